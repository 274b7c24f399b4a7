"""Scripted faults: real signals, once per run, at the first such phase at or after their step.

A fault is claimed in the run's storage before it strikes (``chaos/<index>``, a conditional put), so it
strikes once in the life of a run, whichever machine it falls on and however often recovery, a restart of
the coordinator or a new launch passes the same step. The object holds the time of the strike.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.config.schema.service import ChaosFault
from picotron_ray.errors import AlreadyExistsError


class WorkerChaos:
    """Strikes when this worker's rank enters the phase that a fault names."""

    def __init__(self, faults: tuple[ChaosFault, ...], storage: Callable[[], Storage]) -> None:
        self._faults = {i: f for i, f in enumerate(faults) if f.target.startswith("worker:")}
        self._storage = storage
        self.rank = -1

    def __call__(self, step: int, phase: str) -> None:
        for index, fault in list(self._faults.items()):
            if step >= fault.step and fault.phase == phase and fault.target == f"worker:{self.rank}":
                del self._faults[index]  # ours now, or somebody's before
                if claim(self._storage(), index):
                    strike(fault.fault)


def claim(storage: Storage, index: int) -> bool:
    """True for the first caller in the life of the run."""
    mark = {"at_s": time.time(), "nonce": uuid.uuid4().hex}
    try:
        storage.put_if_absent(f"chaos/{index}", json.dumps(mark).encode())
    except AlreadyExistsError:
        return False
    return True


def strike(fault: str) -> None:
    """Kill, stop or hang the calling process, for real."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hang":
        threading.Event().wait()  # nothing will ever set it
