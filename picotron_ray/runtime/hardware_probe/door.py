"""The probe as a command runs it: on the Ray that is there, or on one of its own that goes away after it."""

from __future__ import annotations

from collections.abc import Callable

import ray

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.planner.hardware_profile import HardwareProfile
from picotron_ray.runtime.hardware_probe.probe import probe
from picotron_ray.runtime.ray_cluster import local_ray
from picotron_ray.runtime.ray_cluster.connect import connect


def measure_nodes(
    job: JobConfig, budget_s: float, say: Callable[[str], None], topology: tuple[str, str] | None = None
) -> HardwareProfile:
    """Connect to Ray, measure its nodes, and take down what was started for it."""
    started = connect(job, begins=False)  # it goes with this process
    try:
        return probe(job, budget_s, say, topology)
    finally:
        ray.shutdown()
        if started is not None:
            with local_ray.locked(started.run):
                local_ray.stop(started, grace_s=0.0, discard=True)
