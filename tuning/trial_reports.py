"""Reports of a trial's run to Ray Tune, whose scheduler may end or move the trial by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ray import tune
from ray.train.v2.api.callback import UserCallback

from tuning.parts import NO_ROUND, ROUND, MemberRun
from tuning.population import noted


class TrialReports(UserCallback):
    """Callback that tells Tune a run's figures on the way; its scheduler may end the trial by them.

    Args:
        complete: adds the figures that follow from a run's own.
        needed: figures without which there is no report.
        last_step: steps of the run; its end is reported by whoever called ``fit``.
    """

    def __init__(
        self, complete: Callable[[dict[str, Any]], dict[str, Any]], needed: Sequence[str], last_step: int
    ) -> None:
        self._complete, self._needed, self._last_step = complete, needed, last_step
        self._reported = 0

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        step = self._due(metrics[0].get("eval_step", 0), checkpoint)
        if not self._reported < step < self._last_step:
            return
        figures = self._complete(metrics[0])
        if all(finite(figures.get(name)) for name in self._needed):
            self._reported = step
            self._tell({**figures, "finished": False}, step)

    def _due(self, evaluated: int, checkpoint: Any) -> int:
        """The step that a report would be about."""
        return evaluated

    def _tell(self, figures: dict[str, Any], step: int) -> None:
        tune.report({**figures, "step": step})

    def end(self, figures: dict[str, Any], step: int) -> None:
        """Report the run's end."""
        tune.report({**figures, "finished": True, "step": step})


class MemberReports(TrialReports):
    """TrialReports of a member of a population: at its commits alone, since others may go on from there.

    Args:
        part: the member's run.
        interval: steps between exchanges.
    """

    def __init__(self, *args: Any, part: MemberRun, interval: int) -> None:
        super().__init__(*args)
        self._part, self._interval = part, interval
        self._reported = part.noted_step
        self._committed = 0

    def _due(self, evaluated: int, checkpoint: Any) -> int:
        if checkpoint is not None:
            self._committed = checkpoint.step
        return self._committed if evaluated >= self._committed else 0

    def _tell(self, figures: dict[str, Any], step: int) -> None:
        with noted(self._part, step) as note:
            tune.report(self._of_member(figures, step), checkpoint=note)

    def end(self, figures: dict[str, Any], step: int) -> None:
        """Report the end, which is no exchange."""
        tune.report({**self._of_member(figures, step), "finished": True, ROUND: NO_ROUND})

    def _of_member(self, figures: dict[str, Any], step: int) -> dict[str, Any]:
        origin = f"{self._part.origin_run}@{self._part.origin_step}" if self._part.origin_run else ""
        reached = self._part.before_steps + step
        return {**figures, "step": reached, ROUND: reached // self._interval, "took_over": origin}


def finite(value: Any) -> bool:
    """Whether a figure is a number that can be compared."""
    return isinstance(value, int | float) and math.isfinite(value)
