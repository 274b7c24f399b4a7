"""Adaptation: how suggestions are ranked, when one is applied, and whether it is kept.

The rules by which it cannot swing: a change must promise more than ``adapt.hysteresis`` of a step and more
seconds than a re-mesh costs; what hurt or brought nothing is not tried again; each further change of a kind
waits twice as long as the one before; and an hour has ``adapt.budget`` of them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from picotron_ray.config.schema.adapt import KINDS, LOSSY, AdaptConfig, AdaptKind
from picotron_ray.coordinator.messages import Adapted
from picotron_ray.coordinator.policies.replan import REMESH_S
from picotron_ray.coordinator.policies.suggestions import Suggestion
from picotron_ray.layout.layout import Layout

MOST_KNOWN = 32
"""Changes of the past that are remembered."""
HOUR_S = 3600.0
LEAST_SHARE = 0.25
"""Share of its promise that a change must bring where that is less than the hysteresis."""
MOST_DOUBLINGS = 10
ACTIONS = ("apply", "kept", "back", "void", "dropped")
"""Decisions on a change: made, kept, taken back since it hurt or since its generation ended, not made."""
REASON = "adapt: "
"""Beginning of the reason of a generation that a change began."""


BY_KEY: dict[AdaptKind, tuple[str, ...]] = {
    "bucket": ("comm.bucket_mib",),
    "precision": ("precision",),
    "compression": ("comm.gradients",),
}
"""Kinds of change that leave the layout, and their keys."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A suggestion with its layout, and the share of a step that it promises to save."""

    suggestion: Suggestion
    layout: Layout
    gain: float

    @property
    def kind(self) -> AdaptKind:
        return self.suggestion.kind

    @property
    def target(self) -> str:
        """Words for what it leads to, by which it is known again."""
        if self.kind in BY_KEY:  # whatever the layout is
            return " ".join(
                f"{key}={text}" for key, text in self.suggestion.settings if key in BY_KEY[self.kind]
            )
        spared = f" without {', '.join(self.suggestion.avoid)}" if self.suggestion.avoid else ""
        return f"{self.layout}{spared}"


def ranked(offers: Sequence[Offer], known: Sequence[Adapted]) -> list[Offer]:
    """Offers that were not taken back before, the one that promises most first."""
    hurt = {(one.kind, one.target) for one in known if one.verdict == "back"}
    left = [offer for offer in offers if (offer.kind, offer.target) not in hurt]
    return sorted(left, key=_order)


def _order(offer: Offer) -> tuple[bool, float, int, str]:
    """Sort key: what makes room comes first, since a step that runs out of memory is lost."""
    return offer.suggestion.strike is None, -offer.gain, KINDS.index(offer.kind), offer.target


def pays(offer: Offer, step_s: float, steps_left: int, hysteresis: float) -> bool:
    """Whether a change promises more than the hysteresis, and more seconds than it costs.

    One for want of memory need not promise any.
    """
    if offer.suggestion.strike is not None:
        return True
    return offer.gain > hysteresis and offer.gain * step_s * steps_left > REMESH_S


def waits_until(kind: AdaptKind, known: Sequence[Adapted], since: float, config: AdaptConfig) -> float:
    """Time before which no further change of a kind is made: twice as long after each one.

    Args:
        since: when the generation began.
    """
    before = min(sum(one.kind == kind for one in known), MOST_DOUBLINGS)
    return since + config.interval_s * 2**before if before else since


def left_in_hour(times: Sequence[float], now: float, budget: int) -> int:
    """Changes that the budget still allows."""
    return budget - sum(now - at < HOUR_S for at in times)


Verdict = Literal["wait", "kept", "back"]


def judge(trial: Adapted, step_s: float, steps: int, config: AdaptConfig) -> tuple[Verdict, str]:
    """Judge a change by the steps after it.

    It is kept where it brought what was noticed, or at least `LEAST_SHARE` of what it promised. A spare that
    took a slow worker's place stays unless it hurts: the slow one would be no better.

    Args:
        step_s: their mean seconds, without waits for data and copies, like the change's ``before_s``.
        steps: that were measured.
    """
    if steps < config.settle_steps:
        return "wait", f"{steps} of {config.settle_steps} steps"
    gain = 1 - step_s / trial.before_s if trial.before_s else 0.0
    said = (
        f"{step_s:.3g} s a step, before it {trial.before_s:.3g} s, {100 * trial.expected:.0f} % less expected"
    )
    if trial.target.startswith(FOR_MEMORY):
        return "kept", said
    lossy = trial.kind in LOSSY
    least = config.hysteresis if lossy else min(config.hysteresis, LEAST_SHARE * trial.expected)
    least = -config.hysteresis if trial.avoid else least
    return ("back" if gain < least else "kept"), said


def avoided(known: Sequence[Adapted], living: Container[str]) -> set[str]:
    """Living workers that are too slow, and whose place spares took."""
    return {name for one in known if one.verdict != "back" for name in one.avoid if name in living}


def began_of(change: Adapted) -> str:
    """The generation that began with a change, in words that a record of verdicts reads."""
    return "" if change.began is None else str(change.began)


def settled(done: Adapted) -> Adapted:
    """A judged change without what it would be taken back to."""
    return replace(done, layout=None, settings=(), workers=())


def owed(known: Sequence[Adapted]) -> Adapted | None:
    """The newest change where it hurt and is not taken back yet."""
    newest = known[-1] if known else None
    return newest if newest is not None and newest.verdict == "back" and newest.layout is not None else None


FOR_MEMORY = "memory: "
"""Beginning of the target of a change that was made for want of memory, and is judged by that alone."""


def remembered(known: Sequence[Adapted], new: Adapted) -> tuple[Adapted, ...]:
    """The changes with a new one, the oldest forgotten where they are too many."""
    return (*known[-(MOST_KNOWN - 1) :], new)
