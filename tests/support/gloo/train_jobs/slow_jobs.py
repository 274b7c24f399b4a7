"""A slowed process in the pool: its sleeps are noted instead of slept."""

from __future__ import annotations

from unittest.mock import patch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train import slowness
from tests.support.gloo.parallel_jobs.matrix_jobs import Result, run_layout
from tests.support.gloo.pool import Job


def slept(job: Job, config: JobConfig, layout: Layout, row_s: float) -> tuple[Result, list[float]]:
    """Train as `run_layout` does, every rank slowed; returns the seconds of each sleep too."""
    seconds: list[float] = []
    with (
        patch.object(slowness.Slowness, "row_s", row_s),
        patch.object(slowness.time, "sleep", seconds.append),
    ):
        (result,) = run_layout(job, [config], layout)
    return result, seconds
