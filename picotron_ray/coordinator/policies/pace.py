"""Pace of a generation: seconds a step, as far as a coordinator can know them.

One that began the generation has seen all of its steps. One that adopted it learns how far it is from the
first heartbeat: the steps up to there were done in a time that it has not seen, and count for nothing. Until
it has seen enough itself, what the workers' pages say of their last step is the least that it counts on.
"""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH_STEPS = 3  # that were seen to be done, after which nothing else is needed to know their time


@dataclass(frozen=True, slots=True)
class Hold:
    """All ranks stay at a step boundary, as a person's tool asks: no part of any step's time.

    Fields:
        node: whose heartbeat showed it first.
        step: after which they stay.
        since: when that was heard.
        told: whether there was an alert of it.
    """

    node: str
    step: int
    since: float
    told: bool = False


@dataclass(frozen=True)
class StepPace:
    """Beginning of the count of steps: ``step`` finished ones at the time ``at``."""

    step: int
    at: float
    adopted: bool = False  # ``step`` is where the generation began, which tells nothing of how far it is
    told_s: float = 0.0  # time of a step, as pages said at the beginning of the term; 0.0: they did not

    def seen(self, step: int, now: float) -> StepPace:
        """Return the pace after a heartbeat that shows ``step`` finished steps."""
        return StepPace(step, now, told_s=self.told_s) if self.adopted else self

    def step_s(self, step: int, now: float) -> float:
        """Seconds a step, where ``step`` are finished ``now``."""
        done = 0 if self.adopted else step - self.step
        measured_s = (now - self.at) / max(1, done)
        return measured_s if done >= ENOUGH_STEPS else max(self.told_s, measured_s)
