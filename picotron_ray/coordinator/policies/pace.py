"""Pace of a generation: seconds a step, as far as a coordinator can know them.

One that began the generation has seen all of its steps. One that adopted it learns how far it is from the
first heartbeat: the steps up to there were done in a time that it has not seen, and count for nothing. Until
it has seen enough itself, what the workers' pages say of their last step is the least that it counts on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from picotron_ray.coordinator.messages import Alert
from picotron_ray.coordinator.policies.calibration import StepWindow

HELD = "held"  # kind of the alerts that tell of a hold and of its end
ENOUGH_STEPS = 3  # that were seen to be done, after which nothing else is needed to know their time


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
        measured_s = max(0.0, now - self.at) / max(1, done)  # it may begin within a hold
        return measured_s if done >= ENOUGH_STEPS else max(self.told_s, measured_s)


Measurement = TypeVar("Measurement", StepPace, StepWindow)


@dataclass(frozen=True, slots=True)
class Hold:
    """All ranks stay at a step boundary, as a person's tool asks: no part of any step's time.

    Fields:
        node: whose heartbeats show it: the first that did, or one that did while that was silent.
        step: after which they stay.
        since: when that was heard.
        told: whether there was an alert of it.
    """

    node: str
    step: int
    since: float
    told: bool = False

    def left_out(self, measured: Measurement, until: float) -> Measurement:
        """Return a measurement without this hold, which is over; of one that began within it, the rest."""
        before_s = max(0.0, self.since - measured.at)
        return replace(
            measured, at=max(measured.at, until - before_s)
        )  # never past ``until``, nor by rounding

    def over(self, until: float) -> tuple[Alert, ...]:
        """Tell its end, where it was told."""
        held_s = until - self.since
        text = f"the run goes on after it was held for {held_s:.0f} s after step {self.step}"
        alert = Alert("info", text, HELD, {"step": self.step, "held_s": held_s, "held": False})
        return (alert,) if self.told else ()


def measured_until(now: float, hold: Hold | None) -> float:
    """Time up to which steps are measured: while a hold lasts, its beginning."""
    return now if hold is None else hold.since
