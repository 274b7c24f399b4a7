"""Replay of a curriculum's decisions from the ledger: whether each stage began where the losses say."""

from __future__ import annotations

from picotron_ray.data.ledger_line import LedgerLine
from picotron_ray.data.plan.advance import StageRecord
from picotron_ray.data.plan.advance_rule import AdvanceRule, Starts


class StageReplay:
    """Check of the stages that lines claim, in the order of their steps.

    Behind a line that is missing, was lost, or comes out of order, nothing can be decided anew until a line
    holds the record of the windows before it. In between, what lines claim is taken for true, but for a stage
    that moves.
    """

    def __init__(self, rule: AdvanceRule) -> None:
        self._rule = rule
        self._record: StageRecord | None = StageRecord(rule)
        self._claimed: dict[int, int] = {}

    def problem(self, line: LedgerLine) -> str:
        """Say what is wrong with the stages that a line claims; "" where nothing is."""
        if line.stages is None:
            return f"{line.name} says no stages of the curriculum" if not line.passed_over else ""
        for number, start in enumerate(line.stages):
            before = self._claimed.setdefault(number, start)
            if before != start:
                return (
                    f"{line.name} says stage {number + 1} began after step {start}, lines before it {before}"
                )
        record = self._record if self._record is not None and line.step == self._record.at + 1 else None
        if record is None:
            return ""
        wanted = record.begun(line.step)
        if line.stages != wanted:
            return f"{line.name} says stages after steps {list(line.stages)}, expected {list(wanted)}"
        told = line.windows is not None and StageRecord.of(self._rule, line.windows).extra() != record.extra()
        return f"{line.name} says other means of losses than those of the lines before it" if told else ""

    def passed(self, line: LedgerLine) -> None:
        """Take a line that counts into the record."""
        if line.unproven:
            self._record = None
            return
        if self._record is None or line.step != self._record.at + 1:
            there = line.windows is not None and line.windows["at"] == line.step - 1
            self._record = StageRecord.of(self._rule, line.windows) if there and line.windows else None
        if self._record is not None:
            self._record.passed(line.step, None if line.skipped or line.passed_over else line.loss)


def begun(line: LedgerLine) -> Starts:
    """Return the starts that a line claims."""
    return line.stages or (0,)
