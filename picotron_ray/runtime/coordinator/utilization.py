"""Model FLOPs utilisation of a run, against the peak of the devices that it computes on."""

from __future__ import annotations

from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.planner.peaks import mfu_ratio, peak_of_worker


def devices_of(memory: MachineMemory) -> set[str]:
    """Product names of the GPUs of the running generation's nodes; a node with several kinds names all."""
    members = {member.node for member in memory.spec.members} if memory.spec is not None else set()
    nodes = [memory.roster.nodes.get(node) for node in members]
    names = {name for node in nodes if node is not None for name in node.hardware.split(" and ")}
    return names - {""}


def utilization(job: JobConfig, status: dict[str, Any], devices: set[str]) -> tuple[float, str] | None:
    """Share of the peak, and what that is of; None where no peak or no rate is known.

    Args:
        status: the run's.
        devices: as of `devices_of`.
    """
    peak = peak_of_worker(job, devices)
    if peak is None or not status["tokens_per_s"] or not status["members"]:
        return None
    return mfu_ratio(job, status["tokens_per_s"], len(status["members"]), peak), peak.source
