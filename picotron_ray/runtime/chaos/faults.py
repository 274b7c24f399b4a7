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

from picotron_ray.config.schema.service import FaultTarget

FAULTS: dict[str, ProcessFault | SpeedFault | NodeFault] = {}
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


class SpeedFault(ABC):
    """Fault of a worker's process that goes on with another speed."""

    targets: ClassVar[tuple[FaultTarget, ...]] = ("worker",)

    def __init_subclass__(cls, *, name: str) -> None:
        FAULTS[name] = cls()

    @abstractmethod
    def strike(self, row_s: float) -> None:
        """Strike the calling process: from now on each row takes so many seconds more."""


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


class Slow(SpeedFault, name="slow"):
    """Slow device: the process sleeps for every row that it computes, in all generations to come."""

    def strike(self, row_s: float) -> None:
        from picotron_ray.train.slowness import Slowness  # torch, which the coordinator does without

        Slowness.row_s = row_s


class RemoveNode(NodeFault, name="remove-node"):
    """Loss of a machine: its workers, its snapshots, its agent and Ray's own process on it."""

    def strike(self, nodes: Nodes, index: int) -> None:
        nodes.remove_node(index)
