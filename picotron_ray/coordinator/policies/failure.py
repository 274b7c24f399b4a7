"""Decision when to give up, and what to change before that.

Failures that repeat without progress are not answered by the same remedy for ever. They climb the ladder of
``picotron_ray.failures``: after a plain retry the suspect worker is replaced, then the last commit is used
instead of host memory, then fewer workers; then the run fails. A lost node and a corrupt slot explain
themselves and do not climb, but everything counts towards ``max_failures``, which is of the last 24 hours: a
run of months outlives any number of failures that come one by one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from picotron_ray.failures import FAILURE_RULES, LADDER, FailureKind, Remedy

DAY_S = 86_400.0


@dataclass(slots=True)
class Breaker:
    """Counter of failures; ``step`` is the furthest finished step that the present row of them reached."""

    max_failures: int
    max_in_a_row: int
    times: deque[float] = field(default_factory=deque)  # of the failures of the last day, in seconds
    in_a_row: int = 0
    step: int = -1

    def record(self, kind: FailureKind, reached: int, now: float) -> tuple[Remedy, str]:
        """Count one failure at ``now`` after ``reached`` finished steps; what to do, and why.

        Progress is measured by steps reached, not by what can be restored: a step that always crashes
        crashes again after each of the steps before it was repeated.
        """
        self.times.append(now)
        total = self.total(now)
        if reached > self.step:
            self.in_a_row, self.step = 0, reached
        if FAILURE_RULES[kind].climbs:
            self.in_a_row += 1
        if total > self.max_failures:
            return (
                Remedy.GIVE_UP,
                f"{total} failures in 24 hours, more than elastic.max_failures={self.max_failures}",
            )
        if self.in_a_row >= self.max_in_a_row:
            return Remedy.GIVE_UP, (
                f"{self.in_a_row} failures in a row at step {self.step} without progress"
                f" (elastic.max_failures_without_progress={self.max_in_a_row})"
            )
        remedy = LADDER[min(self.in_a_row, len(LADDER) - 1)]
        return remedy, f"failure {self.in_a_row} in a row at step {self.step}"

    def total(self, now: float) -> int:
        """Return how many failures the last 24 hours saw; older ones are forgotten."""
        while self.times and now - self.times[0] >= DAY_S:
            self.times.popleft()
        return len(self.times)

    def progressed(self, step: int) -> bool:
        """Note a finished step; True where it ends a row of failures."""
        if step <= self.step or not self.in_a_row:
            return False
        self.in_a_row = 0
        return True
