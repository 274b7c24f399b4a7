"""Placement of experts by their loads, decided once for each generation; its layout carries the order.

Members tell the loads of their stages as they leave a generation. What they told lasts for as long as nobody
tells anything newer: a generation that ends before its second step has is followed by the order that there
was, or one by older loads. A new coordinator knows none, and goes on with the order of the state.
"""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Source, StepReplay
from picotron_ray.layout.expert_order import balanced, imbalance
from picotron_ray.layout.layout import Layout


def placed_experts(memory: MachineMemory, layout: Layout, point: Source, replay: StepReplay | None) -> Layout:
    """Return the layout of a generation that goes on from ``point`` with its experts placed.

    Args:
        replay: what the generation computes again: by the same ranks, with the same experts.
    """
    if memory.job.layout.expert_placement == "even" or layout.ep == 1:
        return replace(layout, expert_order=())
    wrote = point.layout
    if wrote is None and point.generation is not None:
        wrote = memory.layouts.get(point.generation)
    if replay is not None and memory.spec is not None:
        return replace(layout, expert_order=memory.spec.layout.expert_order)
    before = wrote if wrote is not None and wrote.ep == layout.ep else Layout()
    told = {layer: loads for layer, loads in memory.expert_loads.items() if len(loads) % layout.ep == 0}
    layers = max((*told, len(before.expert_order) - 1), default=-1) + 1
    order = tuple(
        balanced(told[layer], layout.ep, before.experts_of(layer))
        if layer in told
        else before.experts_of(layer)
        for layer in range(layers)
    )
    placed = replace(layout, expert_order=order if any(order) else ())
    if told:
        _report(memory, placed, before, told)
    return placed


def _report(memory: MachineMemory, layout: Layout, before: Layout, told: dict[int, tuple[int, ...]]) -> None:
    """Tell the imbalance (the busiest rank's load over the mean) under the order before, and this one."""
    figures = {
        layer: (
            imbalance(loads, before.experts_of(layer), layout.ep),
            imbalance(loads, layout.experts_of(layer), layout.ep),
        )
        for layer, loads in sorted(told.items())
    }
    moved = [layer for layer in told if before.experts_of(layer) != layout.experts_of(layer)]
    was, now = (sum(pair[at] for pair in figures.values()) / len(figures) for at in (0, 1))
    worst_was, worst_now = (max(pair[at] for pair in figures.values()) for at in (0, 1))
    text = (
        f"experts of {len(moved)} of {len(told)} layers placed anew over {layout.ep} ranks: the busiest has"
        f" {was:.2f} times the mean load before, {now:.2f} times now; in the worst layer {worst_was:.2f} and"
        f" {worst_now:.2f}"
    )
    data = {"before": was, "after": now, "worst_before": worst_was, "worst_after": worst_now}
    memory.alert("info", "experts", text, **data, layers_moved=len(moved), layers=len(told))
