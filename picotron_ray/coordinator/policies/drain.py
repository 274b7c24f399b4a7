"""Departure from nodes that are to go: the decision when a running generation moves off them.

Whatever is gained by staying is weighed against the time that leaving takes. Where the other nodes can carry
on, the run leaves at once, or waits for replacements that are about to come up. Where they cannot, it trains
on until there is just time enough to stop and commit.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 10.0  # longest wait for replacements that are starting, so that the run moves once
MOVE_S = 3.0  # stop at a boundary and start the next generation elsewhere, beside the step at hand
STEP_FACTOR = 1.5  # x the mean step time: the step at hand may be a slow one
COMMIT_FACTOR = 2.0  # x the last commit's time: storage may be slower this time
UNKNOWN_NOTICE_S = 30.0
"""Assumed notice where no deadline is given: the shortest that clouds give (GCP, Azure 30 s, AWS 120 s)."""


@dataclass(frozen=True, slots=True)
class DrainView:
    """Facts of the decision, about the draining node with the nearest deadline. Times are in seconds."""

    waited_s: float  # since its notice
    remaining_s: float | None  # until its deadline; None: none was given
    others_fit: bool  # a layout fits on the nodes that stay
    starting: int  # workers on their way there
    step_s: float  # mean of the present generation
    commit_s: float | None  # from the first upload to the log entry of the last commit; None: there was none


def decide(view: DrainView) -> tuple[bool, str]:
    """Decide whether to leave the draining nodes now, and say why (not)."""
    remaining_s = UNKNOWN_NOTICE_S - view.waited_s if view.remaining_s is None else view.remaining_s
    move_s = MOVE_S + STEP_FACTOR * view.step_s
    if view.others_fit:
        if view.starting and view.waited_s < PATIENCE_S and remaining_s > 2 * move_s:
            return False, f"{view.starting} replacements are on their way"
        return True, "the others carry on"
    if view.commit_s is None:  # half of the notice for training, half for a commit of unknown length
        save_s = (view.waited_s + remaining_s) / 2
    else:
        save_s = COMMIT_FACTOR * view.commit_s
    if remaining_s > move_s + save_s:
        return False, "no layout fits on the other nodes: training goes on until it must be saved"
    return True, "no layout fits on the other nodes: the state is saved in time, and more workers awaited"
