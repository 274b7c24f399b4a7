"""Advance of a curriculum: where its stages begin, decided by the run from the losses of its steps.

`data.plan.advance_rule` says by what. A stage begins `LEAD` steps after the step that decides, since loaders
read ahead. Only losses that all ranks agree on count, so all ranks decide alike. The record travels with the
state in slots and manifests (``extra``) and the starts with the ledger's lines: a restored run goes on as one
that never stopped, and the ledger's check decides anew (`data.plan.stage_replay`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from picotron_ray.config.support.curriculum import LEAD
from picotron_ray.data.plan.advance_rule import AdvanceRule, Starts

CURRICULUM = "curriculum"
"""Key of the record in ``extra``."""


class StageRecord:
    """Stages of one generation: those decided, and the losses that the next decision follows from.

    The loop tells it each step; the loader asks it from another thread and waits where it is ahead.
    """

    def __init__(self, rule: AdvanceRule, step: int = 0) -> None:
        self._rule = rule
        self._changed = threading.Condition()
        self._stopped = False
        self.at = step
        self.starts: Starts = (0,)
        self._sum, self._count = 0.0, 0  # of the window that is being filled
        self._means: list[float] = []  # of the first window of the stage, and of its newest two
        self._decide_by_steps()

    @classmethod
    def of(cls, rule: AdvanceRule, kept: Mapping[str, Any]) -> StageRecord:
        """Make a record again from what ``at_window`` returned."""
        found = cls(rule)
        found.restore({CURRICULUM: kept})
        return found

    # --- the loop ------------------------------------------------------------------------------------

    def passed(self, step: int, loss: float | None) -> str:
        """Take a step into the record; returns what it decided, in words for people, or nothing.

        Args:
            loss: the mean over the step's tokens; None: the step was passed over, or its update left out.
        """
        with self._changed:
            self.at = step
            known = len(self.starts)
            if step == self.starts[-1]:  # the next step is the first of the newest stage
                self._sum, self._count, self._means = 0.0, 0, []
            elif loss is not None and step > self.starts[-1]:
                self._add(loss)
            self._decide_by_steps()
            self._changed.notify_all()
            if len(self.starts) == known:
                return ""
            return self._words(step)

    def _add(self, loss: float) -> None:
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < self._rule.window:
            return
        mean, self._sum, self._count = self._sum / self._count, 0.0, 0
        self._means = [*self._means[:1], *self._means[-1:], mean] if self._means else [mean]
        if self._more and len(self._means) == 3 and self._rule.ends(self._means):
            self.starts = (*self.starts, self.at + LEAD)

    @property
    def _more(self) -> bool:
        return len(self.starts) < len(self._rule.steps)

    def _decide_by_steps(self) -> None:
        """Begin the stages whose forerunners have had their steps by then."""
        while self._more and (end := self.starts[-1] + self._rule.steps[len(self.starts) - 1]) <= (
            self.at + LEAD
        ):
            self.starts = (*self.starts, end)

    def _words(self, step: int) -> str:
        name = self._rule.names[len(self.starts) - 1]
        told = f"step {step}: stage {name} of the curriculum begins after step {self.starts[-1]}"
        if len(self._means) < 3:
            return f"{told}: the one before has had its steps"
        performance, adaptation = self._rule.figures(self._means)
        return f"{told} (performance {performance:.3f}, adaptation {adaptation:.3f})"

    def begun(self, step: int) -> Starts:
        """Return the starts of stages begun before ``step``."""
        return tuple(start for start in self.starts if start < step)

    def at_window(self) -> dict[str, Any] | None:
        """Return the record where a window of losses has just been closed, or a stage begun; None elsewhere.

        The next step's line in the ledger holds it, so that its check goes on behind a line that was lost.
        """
        return None if self._count else self.extra()[CURRICULUM]

    # --- the loader ----------------------------------------------------------------------------------

    def starts_for(self, step: int) -> Starts:
        """Return the starts of stages begun before ``step``, waiting until they are decided.

        Raises RuntimeError after ``stop``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self.at >= step - 1 - LEAD)
            if self._stopped:
                raise RuntimeError("the curriculum is closed")
            return self.begun(step)

    def stop(self) -> None:
        """Let whoever waits go."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # --- the record ----------------------------------------------------------------------------------

    def extra(self) -> dict[str, Any]:
        """Return what slots and manifests keep."""
        return {
            CURRICULUM: {
                "at": self.at,
                "starts": list(self.starts),
                "sum": self._sum,
                "count": self._count,
                "means": self._means,
            }
        }

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Go on with the record of a restored state."""
        kept = extra.get(CURRICULUM)
        if kept is None:
            return
        with self._changed:
            self.at, self.starts = kept["at"], tuple(kept["starts"])
            self._sum, self._count, self._means = kept["sum"], kept["count"], list(kept["means"])
