"""Steps whose memory is traced, beside a count of all living storages after every operator."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.memory.trace import MemoryTrace
from picotron_ray.train.engine import build_engine
from picotron_ray.train.memory_account import held
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch
from tests.support.gloo.pool import Job


class LivingStorages(TorchDispatchMode):
    """Reads the size of every storage that was seen, after every operator.

    Fields:
        peak: bytes at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, *tensors: Any) -> None:
        for one in tensors:
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                self._seen[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.see(*tree_leaves(found))
        living = [storage for ref in self._seen.values() if (storage := ref()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in living))
        return found


def traced_peaks(job: Job, config: JobConfig, layout: Layout) -> tuple[int, int]:
    """Peak bytes of a second step, by the trace and by the count."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    at = layout.coordinates(job.rank).dp

    def step(number: int) -> None:
        engine.gradients_of(batch(config, layout, at, number))
        engine.optimizer_step(1e-3)

    step(1)
    gc.collect()
    living, trace = LivingStorages(), MemoryTrace(held(engine))
    for tensors in held(engine).values():
        living.see(*tensors)
    with living, trace:
        step(2)
    found = trace.account(held(engine))
    engine.close()
    groups.close()
    gc.collect()
    return found.peak_bytes, living.peak
