"""Policy on bad steps: whether a step's update is made, left out, or the end of the run.

It is asked once a step, between the exchange of all ranks and the optimizer's first write. It looks only at
agreed numbers and at its own record of the steps before, which travels with the state in slots and manifests
(``extra``). So all ranks decide alike, and a restored run decides as one that never stopped.

A step is bad where a loss or gradient of any rank is not finite (``elastic.on_nonfinite``). Or where its loss
is a spike (``elastic.on_spike``). fp16's overflows do not come here: the loss scaler repeats those steps.

Where the config asks for a rewind, the policy only reports the step: going back is up to the coordinator.
Steps that a rewind passes over count as steps without an update; nothing of them is judged.

A step whose update is left out still counts as a step. Its samples are fed and stand in the ledger, and the
learning-rate schedule goes on. Weights, moments and their number of updates stay as they were. The number of
such steps is limited. A run over the limit ends, as does one whose last step is not finite.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from picotron_ray.checkpoint.store.manifest import UPDATES
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import samples_of
from picotron_ray.errors import NumericsError

NON_FINITE, SPIKE = "non-finite", "spike"
"""Reasons for which an update is left out, as the ledger spells them."""
SPIKE_WINDOW = 100
"""Updates whose losses a spike is judged by; none is called before there are so many."""
SPIKE_DEVIATIONS = 6.0
SPIKE_RATIO = 1.2
MOST_NAMED = 20
"""Skipped steps that an error names at most, newest ones first to be named."""


class UpdatePolicy:
    """Decisions on the updates of one generation, and the record that they follow from.

    Fields:
        skipped: steps without an update since step 0, passed over ones included.
    """

    def __init__(self, job: JobConfig) -> None:
        self._elastic, self._global_batch, self._steps = job.elastic, job.data.global_batch, job.steps
        self.skipped = 0
        self._recent: list[tuple[int, str]] = []  # skipped steps of the window, oldest first, and why
        self._losses: list[float] = []  # of the newest updates, where spikes are looked for

    # --- a step --------------------------------------------------------------------------------------

    def judge(self, step: int, loss: float, grad_norm: float, finite: bool) -> str:
        """Return why the update of ``step`` is left out; "" where it is made. Changes nothing.

        Args:
            finite: whether the losses and gradient norms of all ranks are.

        Raises:
            NumericsError: the run must end before this update.
        """
        reason = self._reason(loss, finite)
        if not reason:
            return ""
        seen = f"{self._named(step)}: saw loss {loss:g} and gradient norm {grad_norm:g}"
        if self._answer(reason) == "rewind":
            raise NumericsError(f"{seen} ({reason})", step, reason)
        if reason == NON_FINITE:
            if self._elastic.on_nonfinite == "stop":
                raise NumericsError(
                    f"{seen}, expected finite ones (elastic.on_nonfinite=stop); the state of step {step - 1}"
                    " is kept: go on from it with elastic.on_nonfinite=skip, or with a lower learning rate"
                )
            if step == self._steps:
                raise NumericsError(
                    f"{seen}, expected finite ones; it is the last step, and no later one could show that"
                    f" training recovered; the state of step {step - 1} is kept: lower the learning rate"
                )
        recent = [*self._within(step), (step, reason)]
        if len(recent) > self._elastic.max_skipped_steps:
            raise NumericsError(self._too_many(step, seen, recent))
        return reason

    def passed(self, step: int, loss: float, reason: str) -> None:
        """Take a step into the record, as `judge` decided: with the state that it leads to, not before."""
        if reason:
            self.skipped += 1
            self._recent = [*self._within(step), (step, reason)]
        elif self._elastic.on_spike != "off":
            self._losses = [*self._losses, loss][-SPIKE_WINDOW:]

    def pass_over(self) -> None:
        """Take a step into the record that a rewind passes over."""
        self.skipped += 1

    # --- the record ----------------------------------------------------------------------------------

    def extra(self) -> dict[str, Any]:
        """Return what slots keep of the record; nothing where there is none."""
        if not self.skipped and not self._losses:
            return {}
        return {UPDATES: {"skipped": self.skipped, "recent": self._recent, "losses": self._losses}}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Go on with the record of a restored state."""
        kept = extra.get(UPDATES, {})
        self.skipped = kept.get("skipped", 0)
        self._recent = [(step, reason) for step, reason in kept.get("recent", ())]
        self._losses = list(kept.get("losses", ())) if self._elastic.on_spike != "off" else []

    # --- helpers -------------------------------------------------------------------------------------

    def _reason(self, loss: float, finite: bool) -> str:
        if not finite or not math.isfinite(loss):
            return NON_FINITE
        return SPIKE if is_spike(loss, self._losses) else ""

    def _answer(self, reason: str) -> str:
        return self._elastic.on_nonfinite if reason == NON_FINITE else self._elastic.on_spike

    def _within(self, step: int) -> list[tuple[int, str]]:
        """Skipped steps of the window that ends with ``step``."""
        return [entry for entry in self._recent if entry[0] > step - self._elastic.skip_window_steps]

    def _named(self, step: int) -> str:
        return f"step {step} ({samples_of(step, self._global_batch)})"

    def _too_many(self, step: int, seen: str, recent: list[tuple[int, str]]) -> str:
        elastic, others = self._elastic, [f"{self._named(at)} {reason}" for at, reason in recent[:-1]]
        hidden = len(others) - MOST_NAMED
        named = [f"{hidden} more"] * (hidden > 0) + others[-MOST_NAMED:]
        before = f"; skipped before: {', '.join(named)}" if named else ""
        return (
            f"{seen} ({recent[-1][1]}); bad steps within {elastic.skip_window_steps}: {len(recent)}, more"
            f" than elastic.max_skipped_steps={elastic.max_skipped_steps}{before}; the state of step"
            f" {step - 1} is kept: look at these samples, or lower the learning rate"
        )


def bad_end(step: int, eval_loss: float) -> NumericsError:
    """Return the error of a run whose last weights have no finite held-out loss."""
    return NumericsError(
        f"step {step}, the last one: saw a held-out loss of {eval_loss:g}, expected a finite one; its state"
        " is not kept: launch again with a lower learning rate, to go on from the state before"
    )


def is_spike(loss: float, before: list[float]) -> bool:
    """Whether a loss lies above mean + 6 standard deviations and 1.2 x mean of the 100 updates before."""
    if len(before) < SPIKE_WINDOW:
        return False
    mean = statistics.fmean(before)
    deviation = statistics.pstdev(before, mean)
    return loss > mean + SPIKE_DEVIATIONS * deviation and loss > SPIKE_RATIO * mean
