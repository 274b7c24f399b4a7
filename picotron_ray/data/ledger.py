"""Ledger check: every sample of the run was fed exactly once, in the right step, or is named.

Each step of a generation leaves one JSON line::

    {"step": 7, "term": 1, "n": 2, "samples": [192, 224],
     "rows": [[192, 208, "<32 hex digits>"], [208, 224, "..."]], "tokens": 4096, "loss": 2.71,
     "grad_norm": 0.9, "learning_rate": 0.001, "at_s": 1790000000.123}

A step whose update was left out says why in one key more, ``skipped``: its samples were fed, and moved
nothing. Loss and norm are null where they were not finite. A step that a rewind passed over says
``passed_over``: it has no rows, and the run's log must know of the rewind. One whose own line was lost before
it was committed says ``unproven``: its samples count as lost. Where a curriculum advances by what the run
learns, ``stages`` are the steps before each stage begun, and ``windows``, where a window of losses had just
ended, the record that the next decision follows from.

``rows`` has one entry per DP replica: the half-open range of global sample numbers, and the digest of the
tokens that went into the model (``data.batch.token_digest``), taken from the batch itself. Of many replicas,
neighbours share an entry, which ends with their number, so that a line does not grow with them; where they
are fed unevenly, with the rows of each. The checker
knows nothing of layouts and trusts no number of the ledger. It makes every row again from the source data
and the order of samples, and compares digests. Where one differs, ``ledger_diagnosis`` looks for a deviation
that explains it, so that a report names the sample. A sample that no digest proves counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from picotron_ray.data.batch import token_digest
from picotron_ray.data.ledger_counts import Feedings, Lines
from picotron_ray.data.ledger_diagnosis import MOST_TRIES, diagnose
from picotron_ray.data.ledger_line import LedgerLine, parse_line, shared_digest
from picotron_ray.data.plan.sample_plan import Feed, SamplePlan, StagedPlan
from picotron_ray.data.plan.stage_replay import StageReplay, begun
from picotron_ray.data.samples import SampleSet
from picotron_ray.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """Verdict on a ledger.

    Fields:
        steps: steps that count, 1 .. steps.
        samples: distinct samples proven to have been fed.
        lost: samples of those steps that no digest proves to have been fed.
        repeated: feedings of a sample beyond its first.
        void: lines of steps that a later generation went back behind; they do not count.
        wrong: one line of text per finding.
        skipped: samples of steps whose update was left out. They were fed, and count as such too.
        passed_over: samples that a rewind passed over. They were not fed, and are not lost.
    """

    steps: int
    samples: int
    lost: int
    repeated: int
    void: int
    wrong: tuple[str, ...]
    skipped: int = 0
    passed_over: int = 0

    @property
    def ok(self) -> bool:
        return not (self.lost or self.repeated or self.wrong)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "steps": self.steps,
            "samples": self.samples,
            "lost": self.lost,
            "repeated": self.repeated,
            "void": self.void,
            "skipped": self.skipped,
            "passed_over": self.passed_over,
            "wrong": list(self.wrong),
        }


@dataclass(slots=True)
class _Audit:
    """State of one check."""

    plan: SamplePlan
    dataset: SampleSet | None  # None: what rows say of themselves is taken for true
    wrong: list[str] = field(default_factory=list)  # findings on the line at hand
    fed: Feedings = field(default_factory=Feedings)
    unproven: list[int] = field(default_factory=list)  # steps
    stages: StageReplay | None = None

    def __post_init__(self) -> None:
        if isinstance(self.plan, StagedPlan) and self.plan.rule is not None:
            self.stages = StageReplay(self.plan.rule)

    def lost(self) -> list[tuple[int, int, str]]:
        """Return the findings on steps of which nothing proves what they fed."""
        return [(each[0], 1, _unproven(each)) for each in _runs(self.unproven)]

    def rows(self, first: int, last: int) -> npt.NDArray[np.int64]:
        assert self.dataset is not None
        return Feed(self.dataset, self.plan).rows(first, last)

    def decided(self, line: LedgerLine) -> None:
        """Check where stages begin, and go on with the plan that follows."""
        if self.stages is not None and isinstance(self.plan, StagedPlan):
            if not line.unproven and (text := self.stages.problem(line)):
                self.wrong.append(text)
            self.stages.passed(line)
            self.plan = self.plan.moved(begun(line))

    def line(self, line: LedgerLine) -> None:
        self.decided(line)
        if line.unproven:
            self.unproven.append(line.step)
            return
        wanted = self.plan.numbers(line.step)
        if line.samples != wanted:
            self.wrong.append(f"{line.name} says samples {line.samples}, expected {wanted}")
        if self.dataset is not None:
            tokens, _ = Feed(self.dataset, self.plan).totals(*wanted)
            if line.tokens != tokens:
                self.wrong.append(f"{line.name} says {line.tokens} tokens, expected {tokens}")
        at, replicas = 0, sum(count for *_, count, _ in line.rows)
        for first, last, digest, count, each in line.rows:
            many = f"s {at} to {at + count - 1}" if count > 1 else f" {at}"
            name = f"{line.name}, replica{many}"
            if not wanted[0] <= first <= last <= wanted[1]:
                self.wrong.append(f"{name} says rows {first}..{last}, outside of {wanted[0]}..{wanted[1]}")
            elif count == 1:
                self.group(name, digest, wanted, [(first, last)])
            else:
                parts = [_part(wanted, index, replicas) for index in range(at, at + count)]
                if each:
                    ends = list(accumulate(each, initial=first))
                    parts = list(pairwise(ends))
                if (parts[0][0], parts[-1][1]) == (first, last):
                    self.group(name, digest, wanted, parts)
                else:
                    self.wrong.append(
                        f"{name} says rows {first}..{last}, expected {parts[0][0]}..{parts[-1][1]}"
                    )
            at += count

    def passed_over(self, line: LedgerLine, asked: bool) -> None:
        """Check that a step was passed over where a rewind says so, and there alone."""
        self.decided(line)
        if not asked:
            self.wrong.append(f"{line.name} was passed over, and the log knows of no rewind")
        elif line.unproven:
            self.unproven.append(line.step)
        elif not line.passed_over or line.rows or line.tokens:
            self.wrong.append(f"{line.name} was fed, though a rewind passes over it")

    def group(self, name: str, digest: str, step: tuple[int, int], parts: Sequence[tuple[int, int]]) -> None:
        """Check the digest of neighbouring replicas' rows, and count what they really fed."""
        if self.dataset is None:
            self.fed.add(parts[0][0], parts[-1][1])
            return
        right = [token_digest(self.rows(*part)) for part in parts]
        if shared_digest(right).hex() == digest:
            self.fed.add(parts[0][0], parts[-1][1])
            return
        for index, (first, last) in enumerate(parts):

            def shared(own: bytes, index: int = index) -> bytes:
                return shared_digest([*right[:index], own, *right[index + 1 :]])

            around = step[1] - step[0]
            low = max(0, first - around)
            window = self.rows(low, last + around)
            tries = MOST_TRIES // len(parts)
            found = diagnose(window, first - low, last - low, bytes.fromhex(digest), shared, tries)
            if found is not None:
                self.wrong.append(f"{name} {found.describe(low)}")
                self.fed.add(parts[0][0], first)
                self.fed.add_each(found.fed + low)
                self.fed.add(last, parts[-1][1])
                return
        self.wrong.append(f"{name} fed other tokens than rows {parts[0][0]}..{parts[-1][1]} hold")


def check(
    lines: Iterable[str | Mapping[str, Any]],
    plan: SamplePlan,
    dataset: SampleSet | None,
    resumes: Sequence[tuple[int, int, int]] = (),
    last_step: int | None = None,
    passed: Sequence[range] = (),
) -> LedgerReport:
    """Check a ledger against the source data, one line at a time; kept is what is wrong with them.

    Args:
        lines: the ledger's lines, as text or parsed, in any order. Every line counts: the same line
            twice is a repeat.
        plan: which rows each step feeds.
        dataset: the training samples, built anew from the source. None: only the rows that each step says it
            fed are checked against each other.
        resumes: ``(term, n, resume_step)`` of the generations on the run's lineage. A line of an earlier
            generation and a later step than that is void.
        last_step: the last step that must be there; None: the newest one that is.
        passed: steps that rewinds pass over, as the run's log says.
    """
    audit = _Audit(plan, dataset)
    present, skipped, void = Lines(), set[int](), 0
    unreadable: list[str] = []
    findings: list[tuple[int, int, str]] = []  # step, rank within it, text
    beyond: dict[int, str] = {}
    for at, raw in enumerate(lines, 1):
        line = parse_line(raw, at, unreadable)
        if line is None:
            continue
        if _void(line, resumes):
            void += 1
        elif last_step is not None and line.step > last_step:
            beyond.setdefault(line.step, f"{line.name} lies beyond the last step {last_step}")
        else:
            present.add(line.step, line.generation)
            if line.skipped:
                skipped.add(line.step)
            asked = any(line.step in steps_of for steps_of in passed)
            audit.passed_over(line, asked) if line.passed_over or asked else audit.line(line)
            findings += [(line.step, 1, text) for text in audit.wrong]
            audit.wrong.clear()
    findings += [(step, 1, text) for step, text in beyond.items()]
    findings += audit.lost()
    findings += [(step, 0, _fed_again(step, generations)) for step, generations in present.repeated()]
    findings.sort(key=lambda finding: finding[:2])
    steps = last_step if last_step is not None else present.last()
    passed_over = _rows_of(plan, {step for each in passed for step in each if step <= steps})
    wanted = plan.numbers(steps)[1] if steps else 0
    samples, feedings = audit.fed.totals(wanted)
    return LedgerReport(
        steps=steps,
        samples=samples,
        lost=wanted - samples - passed_over,
        repeated=feedings - samples,
        void=void,
        wrong=(*unreadable, *map(_missing, present.missing(steps)), *(text for *_, text in findings)),
        skipped=_rows_of(plan, skipped),
        passed_over=passed_over,
    )


def _rows_of(plan: SamplePlan, steps: Iterable[int]) -> int:
    """Count the rows of some steps."""
    return sum(last - first for first, last in map(plan.numbers, steps))


def _part(step: tuple[int, int], index: int, replicas: int) -> tuple[int, int]:
    """Rows of one of many replicas in a step of these rows."""
    first, last = Layout(dp=replicas).rows(index, step[1] - step[0])
    return step[0] + first, step[0] + last


def _fed_again(step: int, generations: Sequence[tuple[int, int]]) -> str:
    names = ", ".join(f"{term}.{n}" for term, n in generations)
    return f"step {step} was fed {len(generations)} times, by generations {names}"


def _void(line: LedgerLine, resumes: Sequence[tuple[int, int, int]]) -> bool:
    return any(line.generation < (term, n) and line.step > resume for term, n, resume in resumes)


def _runs(steps: Iterable[int]) -> list[range]:
    """Join steps that follow each other.

    >>> _runs([3, 1, 2, 7])
    [range(1, 4), range(7, 8)]
    """
    found: list[range] = []
    for step in sorted(set(steps)):
        if found and found[-1].stop == step:
            found[-1] = range(found[-1].start, step + 1)
        else:
            found.append(range(step, step + 1))
    return found


def _unproven(steps: range) -> str:
    name = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return f"{name}: the ledger lines were lost before they were committed, nothing proves what was fed"


def _missing(steps: range) -> str:
    if len(steps) == 1:
        return f"no line for step {steps[0]}"
    return f"no line for steps {steps[0]} to {steps[-1]}"
