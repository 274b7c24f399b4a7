"""Handlers of what is measured of a running generation, and of what others find in it."""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation_state import MOST_FINDINGS
from picotron_ray.coordinator.machine_memory import MachineMemory


def measured(memory: MachineMemory, event: m.Measured) -> None:
    """Keep the newest figures of the running generation; those of another one say nothing of it."""
    if memory.spec is not None and event.generation == memory.spec.id:
        memory.figures = event


def finding(memory: MachineMemory, event: m.BottleneckReport) -> None:
    """Keep a bottleneck that others found, for the adaptation loop: the newest of each source."""
    if memory.spec is None or event.generation != memory.spec.id:
        return
    kept = [one for one in memory.adaptation.findings if one.source != event.source][1 - MOST_FINDINGS :]
    memory.adaptation = replace(memory.adaptation, findings=(*kept, event))
