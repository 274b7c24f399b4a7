"""Replay of a curriculum's decisions from the ledger: whether each stage began where the losses say."""

from __future__ import annotations

from picotron_ray.data.ledger_line import LedgerLine
from picotron_ray.data.plan.advance import StageRecord
from picotron_ray.data.plan.advance_rule import AdvanceRule, Starts


class StageReplay:
    """Check of the stages that lines claim, in the order of their steps.

    Behind a line that is missing, was lost, or comes out of order, nothing can be decided anew: what lines
    claim is taken for true from there on, but for a stage that moves.
    """

    def __init__(self, rule: AdvanceRule) -> None:
        self._record: StageRecord | None = StageRecord(rule)
        self._claimed: dict[int, int] = {}

    def problem(self, line: LedgerLine) -> str:
        """Say what is wrong with the stages that a line claims; "" where nothing is."""
        if line.stages is None:
            return f"{line.name} says no stages of the curriculum" if not line.passed_over else ""
        for number, start in enumerate(line.stages):
            if self._claimed.setdefault(number, start) != start:
                return (
                    f"{line.name} says stage {number + 1} began after step {start}, lines before it"
                    f" {self._claimed[number]}"
                )
        if self._record is None or line.step != self._record.at + 1:
            return ""
        wanted = self._record.begun(line.step)
        if line.stages != wanted:
            return f"{line.name} says stages after steps {list(line.stages)}, expected {list(wanted)}"
        return ""

    def passed(self, line: LedgerLine) -> None:
        """Take a line that counts into the record."""
        if self._record is None:
            return
        if line.unproven or line.step != self._record.at + 1:
            self._record = None
        else:
            self._record.passed(line.step, None if line.skipped or line.passed_over else line.loss)


def begun(line: LedgerLine) -> Starts:
    """Return the starts that a line claims."""
    return line.stages or (0,)
