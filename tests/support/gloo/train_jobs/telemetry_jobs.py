"""Steps that are timed, with a rank or a stage that is slowed down."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from itertools import count

from picotron_ray.comm.abortable_wait import listen
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.step_clock import HostClock, StepTimes
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch
from tests.support.gloo.pool import Job
from tests.support.gloo.train_jobs.bad_step_jobs import loop_of


def timed_steps(
    job: Job, config: JobConfig, layout: Layout, slow_s: Mapping[int, float], stage: int | None = None
) -> list[tuple[StepTimes, float]]:
    """Take all steps by the loop.

    Args:
        slow_s: by rank, seconds that it sleeps in each forward pass of a micro-batch.
        stage: of which pipeline stage's; None: of all that the rank holds.

    Returns:
        Each step as the clock has it, and its seconds as they are seen from outside.
    """
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    pause_s = slow_s.get(job.rank, 0.0)
    for index, model in engine._models.items():
        if pause_s and stage in (None, index):
            model.register_forward_pre_hook(lambda module, inputs: time.sleep(pause_s))
    at = layout.coordinates(job.rank)
    feeds = (batch(config, layout, at.dp, n) for n in count(1))
    loop = loop_of(config, layout, job.rank, engine, feeds)
    found: list[StepTimes] = []
    loop.clock = HostClock(found.append, layout.rank_stages(at.pp) if layout.pp > 1 else None)
    engine.watch(loop.clock.enter)
    listen(loop.clock.waits)
    outside = []
    for step in range(1, config.steps + 1):
        began = time.perf_counter()
        loop._step(step)
        loop.clock.end()
        outside.append(time.perf_counter() - began)
    engine.close()
    groups.close()
    gc.collect()
    return list(zip(found, outside, strict=True))
