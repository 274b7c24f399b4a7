"""Time limit: the decision when a run must stop so that its state is committed in time."""

from __future__ import annotations

from dataclasses import dataclass

MOVE_S = 3.0  # a boundary, and what the nodes say they hold, beside the step at hand
STEP_FACTOR = 1.5  # x the mean step time: the step at hand may be a slow one
COMMIT_FACTOR = 2.0  # x the last commit's time: storage may be slower this time
END_S = 5.0  # the summary, and the end of all processes
UNKNOWN_S = 120.0  # assumed for a commit before there was one
MOST_SHARE = 0.25  # of what was left at first: longest that is kept for that, and for members that are stuck


@dataclass(frozen=True, slots=True)
class LimitView:
    """Facts of the decision. Times are in seconds."""

    left_s: float  # until the launch must be over
    limit_s: float  # what was left when the coordinator began
    step_s: float  # mean of the present generation
    flush_s: float  # longest that a member takes to write its state as it leaves
    stuck_s: float  # longest until members that do not leave are given up
    commit_s: float | None  # from the first upload to the log entry of the last commit; None: there was none


def decide(view: LimitView) -> tuple[bool, str]:
    """Decide whether to stop now, and say what the time is needed for."""
    if view.commit_s is None:
        save_s = min(UNKNOWN_S, MOST_SHARE * view.limit_s)
    else:
        save_s = COMMIT_FACTOR * view.commit_s
    stuck_s = min(view.stuck_s, MOST_SHARE * view.limit_s)
    move_s = MOVE_S + STEP_FACTOR * view.step_s + view.flush_s + stuck_s
    need_s = move_s + save_s + END_S
    return view.left_s <= need_s, f"which takes {need_s:.0f} s at most ({save_s:.0f} s to commit)"
