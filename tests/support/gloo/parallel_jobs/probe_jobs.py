"""Measurements of the probe, in processes of the pool."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from picotron_ray.planner.hardware_profile import CollectivePoint, MessagePoint
from picotron_ray.runtime.hardware_probe.worker import ProbeWorker
from tests.support.gloo.pool import Job


def timed(
    job: Job, groups: Sequence[tuple[str, Sequence[int]]], seconds: float
) -> tuple[list[CollectivePoint], list[MessagePoint]]:
    """Sums in groups, and messages between the first two ranks."""
    held = job.groups()
    held.connect()
    worker = ProbeWorker("cpu", 1)
    worker._rank = job.rank
    found = worker.collectives(groups, seconds), worker.messages([("loopback", (0, 1))], seconds)
    held.close()
    gc.collect()
    return found
