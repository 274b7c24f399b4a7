"""Room for trials on a cluster: how many fit at once, and the size of a Ray of a study's own."""

from __future__ import annotations

import math
from dataclasses import replace

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds, living_nodes, worker_needs

DRIVER_CPUS = 0.1
"""CPUs of a trial's own actor, which computes nothing."""


def local_cpus(job: JobConfig, concurrent: int, drivers: int = 0) -> int:
    """CPU slots of a Ray of the study's own: that many trials, and a spare worker for each.

    Args:
        drivers: trials' actors at once, where they are more than the trials that train.
    """
    workers = (job.cluster.max_workers + 1) * job.cluster.cpus_per_worker
    return job.cluster.local_cpus or math.ceil(concurrent * workers + max(concurrent, drivers) * DRIVER_CPUS)


def most_at_once(workers: int, needs: WorkerNeeds, nodes: list[NodeView], drivers: int = 0) -> int:
    """Number of trials of ``workers`` workers that fit at once, each with its driver on any node."""
    for count in range(sum(node.capacity(needs) for node in nodes) // workers, 0, -1):
        taken = max(count, drivers) * DRIVER_CPUS
        room = sum(replace(node, cpus=node.cpus - taken).capacity(needs) for node in nodes)
        if room >= count * workers:
            return count
    return 0


def concurrency(job: JobConfig, asked: int | None, drivers: int = 0) -> int:
    """Trials to run at once on the cluster that is connected: ``asked``, or as many as fit.

    Raises:
        ConfigError: not even one fits.
    """
    nodes = living_nodes()
    fit = most_at_once(job.cluster.max_workers, worker_needs(job.cluster, nodes), nodes, drivers)
    if not fit:
        raise ConfigError(
            f"cluster.max_workers: saw {job.cluster.max_workers}, which do not fit the cluster beside"
            f" {max(1, drivers) * DRIVER_CPUS:g} CPU for the trials' drivers; lower it or add nodes"
        )
    return min(asked or fit, fit)


def device_of(job: JobConfig) -> str:
    """``cuda`` or ``cpu``: what workers get on the cluster that is connected."""
    return "cuda" if worker_needs(job.cluster, living_nodes()).gpus else "cpu"
