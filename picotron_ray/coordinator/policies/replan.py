"""Replanning: the decision whether a running generation gives way to a layout that was planned later.

It only ever happens towards a layout that the same cost model holds to be faster, and on which the planner
has settled for these workers. So it cannot swing back and forth.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GAIN = 0.05  # the planned layout must be predicted faster by this share
REMESH_S = 5.0  # what changing over may cost, workers' first steps included


@dataclass(frozen=True, slots=True)
class ReplanView:
    """Facts of the decision. Costs are predicted seconds per step."""

    progressed: bool  # the present generation has finished a step
    steps_left: int
    cost_s: float  # of the running layout; infinite: it may not run any longer
    planned_cost_s: float


def decide(view: ReplanView) -> tuple[bool, str]:
    """Decide whether to re-mesh now, and say why (not)."""
    said = f"{view.planned_cost_s:.3g} s against {view.cost_s:.3g} s a step by estimate"
    if not view.progressed:
        return False, "the present generation has not finished a step yet"
    if view.planned_cost_s > view.cost_s * (1 - LEAST_GAIN):
        return False, f"no gain: {said}"
    if (view.cost_s - view.planned_cost_s) * view.steps_left <= REMESH_S:
        return False, f"too few steps are left to gain from it: {said}"
    return True, said
