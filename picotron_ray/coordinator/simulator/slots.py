"""Snapshots of the simulation: a state is represented by its history, and a slot holds part of a state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from picotron_ray.coordinator import messages as m
from picotron_ray.layout.layout import Layout

StepHistory = tuple[tuple[m.GenerationId, int, int], ...]
"""Segments (generation, from, to): which generation did which steps."""


@dataclass(slots=True)
class SimSlot:
    """A sealed slot in an agent's folder."""

    info: m.SlotInfo
    history: StepHistory
    pinned: bool = False
    corrupt: bool = False


def complete(slots: Iterable[m.SlotInfo], layout: Layout) -> bool:
    """Whether slots of one state hold all of it (the checks' own rule, not the machine's)."""
    have = {(part.group, part.count, part.index) for slot in slots for part in slot.fragments}
    counts = {(group, count) for group, count, _ in have}
    return all(
        any(g == group and all((g, n, i) in have for i in range(n)) for g, n in counts)
        for group in range(layout.state_groups)
    )
