"""Rewinds: whether a bad step is answered by going back to an older state, and whether a user's wish is owed.

A spike or NaN is often the work of updates before the step that shows it. So the run goes back by
``elastic.rewind_steps``, and passes over the samples up to the bad step, as PaLM's training did (Chowdhery et
al. 2022, section 5.1). Rewinds are bounded within a window of steps; one more ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec, Rewind

BY_RULE = "rule "
"""Beginning of the reason of a rewind that a rule over telemetry asked for (``alerts.act``)."""


@dataclass(frozen=True, slots=True)
class BadStep:
    """Report of the workers, or of a rule: a step whose numbers are not to be trained on, in their words."""

    step: int
    reason: str  # non-finite, spike, or BY_RULE and the rule's name
    text: str


def by_rule(bad: BadStep | None) -> bool:
    """Whether a rule asks to go back for this step."""
    return bad is not None and bad.reason.startswith(BY_RULE)


def asked_for(job: JobConfig, bad: BadStep) -> bool:
    """Whether the config answers such a step with a rewind. The last step leaves none to recover in."""
    if by_rule(bad):
        return bad.step < job.steps
    answer = job.elastic.on_spike if bad.reason == "spike" else job.elastic.on_nonfinite
    return answer == "rewind" and bad.step < job.steps


def decide(job: JobConfig, bad: BadStep, before: Sequence[Rewind]) -> tuple[bool, str]:
    """Decide whether to rewind for a bad step, and say why (not).

    Args:
        before: rewinds of the run's history.
    """
    elastic = job.elastic
    recent = [rewind for rewind in before if rewind.bad_step > bad.step - elastic.skip_window_steps]
    if len(recent) < elastic.max_rewinds:
        count = f"rewind {len(recent) + 1} of at most {elastic.max_rewinds}"
        return True, f"{count} within {elastic.skip_window_steps} steps"
    batch = job.data.global_batch
    named = ", ".join(f"step {r.bad_step} ({samples(r, batch)} passed over) {r.reason}" for r in recent)
    return False, (
        f"{bad.text}; rewinds within {elastic.skip_window_steps} steps: {len(recent)}, as many as"
        f" elastic.max_rewinds allows; rewound before for {named}; the newest state before step {bad.step} is"
        " kept: look at these samples, or lower the learning rate"
    )


def owed_step(job: JobConfig, generations: Iterable[GenerationSpec]) -> int | None:
    """Return ``checkpoint.resume_step`` where the run has yet to go back to it; None where it need not.

    It is obeyed once: a launch with the same config, or a restart, does not go back again, as that would void
    all that was committed since.

    Args:
        generations: all that are known; the newest one says what was obeyed.
    """
    step = job.checkpoint.resume_step
    newest = max(generations, key=lambda spec: spec.id, default=None)
    return None if newest is not None and newest.obeyed_step == step else step


def samples(rewind: Rewind, global_batch: int) -> str:
    """Name the samples that a rewind passes over, both ends included.

    Example:
        >>> samples(Rewind(2, 4, "spike"), 8)
        'samples 16 to 31'
    """
    return f"samples {rewind.to_step * global_batch} to {rewind.bad_step * global_batch - 1}"
