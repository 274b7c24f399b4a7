"""Growth: the decision whether a running generation gives way to a bigger one.

A re-mesh costs about a second, so workers that come up together are awaited and taken in at once, and a
generation is left alone until it has shown that it works.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 10.0  # longest wait of a ready worker for others that are still starting
LEAST_GAIN = 0.01  # a bigger layout must be predicted faster by this share


@dataclass(frozen=True, slots=True)
class GrowthView:
    """Facts of the decision. Costs are predicted seconds per step; times are on the machine's clock."""

    enabled: bool
    ready_since: float | None  # since when the longest-waiting spare worker is ready; None: no spare
    starting: int  # workers on their way
    progressed: bool  # the present generation has finished a step
    steps_left: int
    cost_s: float  # of the present layout
    bigger_cost_s: float | None  # of the layout with all ready workers; None: none fits that is bigger
    ordered: bool = False  # by an operator, who need not gain by it


def decide(now: float, view: GrowthView) -> tuple[bool, str]:
    """Decide whether to re-mesh now, and say why (not)."""
    if not view.enabled:
        return False, "growth is off"
    if view.ready_since is None:
        return False, "no spare worker"
    if not view.progressed:
        return False, "the present generation has not finished a step yet"
    if view.steps_left <= 1:
        return False, "the run is about to end"
    if view.starting and now - view.ready_since < PATIENCE_S:
        return False, f"{view.starting} more workers are on their way"
    if view.bigger_cost_s is None:
        return False, "no bigger layout fits"
    if view.ordered:
        return True, "an operator asked for more workers"
    if view.bigger_cost_s > view.cost_s * (1 - LEAST_GAIN):
        return False, f"no gain: {view.bigger_cost_s:.3g} s against {view.cost_s:.3g} s a step by estimate"
    return True, f"{view.bigger_cost_s:.3g} s against {view.cost_s:.3g} s a step by estimate"
