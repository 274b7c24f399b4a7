"""Scripted faults of workers: at the first such phase at or after their step."""

from __future__ import annotations

from collections.abc import Callable

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.config.schema.chaos import ChaosFault
from picotron_ray.runtime.chaos.claims import claim
from picotron_ray.runtime.chaos.faults import FAULTS, LastingFault, ProcessFault


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
                    _strike(fault)


def _strike(fault: ChaosFault) -> None:
    kind = FAULTS[fault.fault]
    if isinstance(kind, LastingFault):
        strength = getattr(fault, kind.key)
        assert strength is not None, "the config asks for it"
        kind.strike(strength)
    else:
        assert isinstance(kind, ProcessFault), "the config lets no other fault target a worker"
        kind.strike()
