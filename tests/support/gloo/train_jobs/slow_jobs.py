"""Slowed processes in the pool: their sleeps are noted, or their steps timed."""

from __future__ import annotations

import gc
from unittest.mock import patch

from picotron_ray.comm.abortable_wait import listen
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train import slowness
from picotron_ray.train.engine import build_engine
from picotron_ray.train.step_clock import HostClock, StepTimes
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Result, batch, run_layout
from tests.support.gloo.pool import Job

TIMED = 5


def slept(job: Job, config: JobConfig, layout: Layout, row_s: float) -> tuple[Result, list[float]]:
    """Train as `run_layout` does, every rank slowed; returns the seconds of each sleep too."""
    seconds: list[float] = []
    with (
        patch.object(slowness.Slowness, "row_s", row_s),
        patch.object(slowness.time, "sleep", seconds.append),
    ):
        (result,) = run_layout(job, [config], layout)
    return result, seconds


def timed(job: Job, config: JobConfig, layout: Layout, row_s: tuple[float, ...]) -> list[StepTimes]:
    """Take some steps, each rank slowed by its own ``row_s``; all but the first are timed."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    at, found = layout.coordinates(job.rank), list[StepTimes]()
    clock = HostClock(found.append, layout.rank_stages(at.pp))
    engine.watch(clock.enter)
    listen(clock.waits)
    with patch.object(slowness.Slowness, "row_s", row_s[job.rank]):
        for step in range(1, TIMED + 2):
            feed = batch(config, layout, at.dp, step)
            clock.begin(step)
            clock.fed(feed)
            engine.gradients_of(feed, clock.enter)
            clock.enter("optimizer")
            engine.optimizer_step(config.optimizer.learning_rate)
            clock.end()
    listen(unheard)
    engine.close()
    groups.close()
    gc.collect()
    return found[1:]


def unheard(begins: bool) -> None:
    """Hear nothing of waiting."""
