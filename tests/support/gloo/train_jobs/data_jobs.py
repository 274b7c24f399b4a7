"""What data parallelism sends when, and fp16 on several ranks."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import picotron_ray.parallel.data.ddp as replicated
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine, build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Piece, batch, pieces
from tests.support.gloo.pool import Job


class Collectives(TorchDispatchMode):
    """Counts what this thread hands to torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def _opened(job: Job, config: JobConfig, layout: Layout) -> tuple[Any, Engine]:
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    return groups, engine


def _closed(groups: Any, engine: Engine) -> None:
    engine.close()
    groups.close()
    gc.collect()


def collectives(job: Job, config: JobConfig, layout: Layout) -> dict[str, int]:
    """How often each collective runs in the second step, by name."""
    groups, engine = _opened(job, config, layout)
    for step in (1, 2):
        with Collectives() as seen:
            engine.forward_backward(batch(config, layout, layout.coordinates(job.rank).dp, step))
            engine.reduce()
        engine.clip()
        engine.optimizer_step(0.01)
    _closed(groups, engine)
    return dict(seen.counts)


def overlapped(job: Job, config: JobConfig, layout: Layout, bucket_bytes: int) -> tuple[int, list[int]]:
    """The number of buckets, and how many of them were on their way at each phase of one step."""
    kept, replicated.ReplicatedGradients.__init__.__defaults__ = (
        replicated.ReplicatedGradients.__init__.__defaults__,
        (bucket_bytes,),
    )
    try:
        groups, engine = _opened(job, config, layout)
    finally:
        replicated.ReplicatedGradients.__init__.__defaults__ = kept
    (copies,) = engine._gradients._replicated
    started: list[int] = []

    def on_phase(phase: str) -> None:
        if phase in ("backward", "reduce"):
            started.append(copies._started)

    engine.gradients_of(batch(config, layout, layout.coordinates(job.rank).dp, 1), on_phase)
    found = len(copies._buckets), started
    _closed(groups, engine)
    return found


def scaled(
    job: Job, config: JobConfig, layout: Layout, scale: float
) -> tuple[float, list[float], list[Piece]]:
    """A step that begins with a loss scale: the norm, the state of the scale after it, and the gradients."""
    groups, engine = _opened(job, config, layout)
    (state,) = [item.tensor for item in engine.state() if item.shard.name == "scaler/loss_scale"]
    state[0] = scale
    _, norm = engine.gradients_of(batch(config, layout, layout.coordinates(job.rank).dp, 1))
    gradients = pieces(engine.gradients())
    engine.optimizer_step(0.01)
    found = float(norm), state.tolist(), gradients
    _closed(groups, engine)
    return found
