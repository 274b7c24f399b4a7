"""Calibration of the cost model: seconds per step as measured, against the planner's estimate.

The model ranks layouts; how far its seconds are off on a cluster is one factor for all of them, as far as one
factor goes (``picotron-ray plan --validate`` holds it to that). It is measured over windows of a generation
that double, and a factor that changes within a generation is a warning: something has become slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LEAST_STEPS = 10
"""Of the first window, which counts for nothing: its steps compile and touch memory."""
LEAST_S = 10.0
"""Of any window that counts: heartbeats tell of steps once a second."""
DRIFT = 1.5
"""Factor by which measured over estimated seconds may change within a generation."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """A window of steps that is being measured.

    Fields:
        generation: whose steps: term and number.
        step, at: the last finished step before it, and when that was heard.
        steps: that it shall have at least.
        ratio: measured over estimated seconds in the window before; 0: there was none that counts.
    """

    generation: tuple[int, int]
    step: int
    at: float
    steps: int = LEAST_STEPS
    ratio: float = 0.0

    def measured_s(self, step: int, now: float) -> float | None:
        """Seconds per step of the window; None while it goes on."""
        done, taken = step - self.step, now - self.at
        least_s = 0.0 if self.warms_up else LEAST_S
        return taken / done if done >= self.steps and taken >= max(least_s, 1e-9) else None

    @property
    def warms_up(self) -> bool:
        """Whether it is the first of its generation."""
        return self.steps == LEAST_STEPS

    def after(self, step: int, now: float, ratio: float) -> StepWindow:
        """The next window, twice as many steps."""
        return replace(self, step=step, at=now, steps=2 * self.steps, ratio=ratio)


def drifted(before: float, now: float) -> bool:
    """Whether the ratio has changed by more than `DRIFT`, to either side.

    >>> drifted(1.0, 1.4), drifted(1.0, 1.6), drifted(1.0, 0.6), drifted(0.0, 5.0)
    (False, True, True, False)
    """
    return before > 0 and not 1 / DRIFT <= now / before <= DRIFT


def ratio_of(measured_s: float, estimated_s: float) -> float | None:
    """Measured over estimated seconds; None where there is no estimate."""
    return measured_s / estimated_s if 0 < estimated_s < math.inf else None
