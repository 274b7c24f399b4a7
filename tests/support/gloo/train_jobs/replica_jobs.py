"""Ranks that compare what they hold alike, and what they find where one of them was tampered with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import DivergedError
from picotron_ray.layout.layout import Layout
from picotron_ray.train.disturbance import flip_bit
from picotron_ray.train.engine import build_engine
from picotron_ray.train.replica_check import replica_check
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch
from tests.support.gloo.pool import Job

Flips = Mapping[int, Sequence[tuple[int, str, int]]]
"""By step after which bits turn over: rank, name of a tensor of its state, element."""


def trained(
    job: Job,
    config: JobConfig,
    layout: Layout,
    steps: int,
    every: int,
    flips: Flips,
    replay: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Train; what the check covers and found."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    check = replica_check(every, engine.replicated, job.rank, layout.world_size, CPU, 0, replay)
    said: dict[str, Any] = {"applied": check.applied, "text": "", "found": None}
    try:
        for step in range(1, steps + 1):
            engine.gradients_of(batch(config, layout, layout.coordinates(job.rank).dp, step))
            engine.optimizer_step(0.01)
            for rank, name, element in flips.get(step, ()):
                if rank == job.rank:
                    (tensor,) = (t.tensor for _, t in engine.replicated() if t.shard.name == name)
                    flip_bit(tensor, element)  # type: ignore[arg-type]
            if check.due(step, leaving=step == steps):
                check.check(step)
    except DivergedError as error:
        said |= {"text": str(error), "found": dict(error.found)}
    engine.close()
    groups.close()
    return said
