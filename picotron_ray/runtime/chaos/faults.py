"""Scripted faults: one class each, with ``strike``; ``docs/add-a-fault.md`` adds one step by step.

A fault strikes for real: signals, blocked threads, dead machines. When it strikes, and that it strikes only
once, is decided by ``worker_chaos`` and ``coordinator_chaos``.
"""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from picotron_ray.config.schema.chaos import FaultTarget

FAULTS: dict[str, ProcessFault | LastingFault | NodeFault] = {}
"""One instance of each fault, by its name in the config (``chaos.<i>.fault``)."""


class Nodes(Protocol):
    """The nodes of a run, as its coordinator reaches them."""

    def remove_node(self, index: int) -> None:
        """Unplug the node that joined as number ``index``, counted from 0."""
        ...


class ProcessFault(ABC):
    """Fault of the process that it strikes: a worker, or the coordinator."""

    targets: ClassVar[tuple[FaultTarget, ...]] = ("worker", "coordinator")

    def __init_subclass__(cls, *, name: str) -> None:
        FAULTS[name] = cls()

    @abstractmethod
    def strike(self) -> None:
        """Strike the calling process."""


class LastingFault(ABC):
    """Fault of a worker's process that goes on, and does something otherwise from now on.

    ``key`` is the key of the config that says how much.
    """

    targets: ClassVar[tuple[FaultTarget, ...]] = ("worker",)
    key: ClassVar[str] = "row_s"

    def __init_subclass__(cls, *, name: str) -> None:
        FAULTS[name] = cls()

    @abstractmethod
    def strike(self, strength: float) -> None:
        """Strike the calling process: from now on it is disturbed so much."""


class NodeFault(ABC):
    """Fault of a whole node, ordered by the coordinator."""

    targets: ClassVar[tuple[FaultTarget, ...]] = ("node",)

    def __init_subclass__(cls, *, name: str) -> None:
        FAULTS[name] = cls()

    @abstractmethod
    def strike(self, nodes: Nodes, index: int) -> None:
        """Strike the node that joined as number ``index``."""


class Kill(ProcessFault, name="kill"):
    """SIGKILL: the process is gone at once, with its sockets and memory."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stop(ProcessFault, name="stop"):
    """SIGSTOP: the process and its sockets stay, and nothing in it moves."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Hang(ProcessFault, name="hang"):
    """Deadlock: the calling thread never returns, the others go on."""

    def strike(self) -> None:
        threading.Event().wait()  # nothing will ever set it


class Slow(LastingFault, name="slow"):
    """Slow device: the process sleeps for every row that it computes, in all generations to come."""

    def strike(self, strength: float) -> None:
        from picotron_ray.train.slowness import Slowness  # torch, which the coordinator does without

        Slowness.row_s = strength


class SlowData(LastingFault, name="slow-data"):
    """Slow file system: each row of data comes late, in all generations to come."""

    def strike(self, strength: float) -> None:
        from picotron_ray.train.disturbance import Disturbance

        Disturbance.row_s = strength


class Nan(ProcessFault, name="nan"):
    """Bad kernel: the output of one forward pass is not a number."""

    targets = ("worker",)

    def strike(self) -> None:
        from picotron_ray.train.disturbance import Disturbance

        Disturbance.nan = True


class Scale(LastingFault, name="scale"):
    """Bad weights or data: what the process's stages put out is multiplied, and the loss with it."""

    key = "factor"

    def strike(self, strength: float) -> None:
        from picotron_ray.train.disturbance import Disturbance

        Disturbance.factor = strength


class ScaleGradients(LastingFault, name="scale-gradients"):
    """Exploding or vanishing gradients: those of the process's stages are multiplied."""

    key = "factor"

    def strike(self, strength: float) -> None:
        from picotron_ray.train.disturbance import Disturbance

        Disturbance.gradient_factor = strength


class Leak(LastingFault, name="leak"):
    """Leak: the process keeps memory at every forward pass."""

    key = "pass_bytes"

    def strike(self, strength: float) -> None:
        from picotron_ray.train.disturbance import Disturbance

        Disturbance.pass_bytes = int(strength)
        if not strength:
            Disturbance.kept.clear()


class Flip(ProcessFault, name="flip"):
    """Bad memory: a bit of the process's first weight turns over during its next forward pass."""

    targets = ("worker",)

    def strike(self) -> None:
        from picotron_ray.train.disturbance import Disturbance

        Disturbance.flip = True


class RemoveNode(NodeFault, name="remove-node"):
    """Loss of a machine: its workers, its snapshots, its agent and Ray's own process on it."""

    def strike(self, nodes: Nodes, index: int) -> None:
        nodes.remove_node(index)
