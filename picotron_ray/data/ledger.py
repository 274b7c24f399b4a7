"""Ledger check: every sample of the run was fed exactly once, in the right step, or is named.

Each step of a generation leaves one JSON line::

    {"step": 7, "term": 1, "n": 2, "samples": [192, 224],
     "rows": [[192, 208, "<32 hex digits>"], [208, 224, "..."]], "tokens": 4096, "loss": 2.71,
     "grad_norm": 0.9, "learning_rate": 0.001, "at_s": 1790000000.123}

``rows`` has one entry per DP replica: the half-open range of global sample numbers, and the digest of the
tokens that went into the model (``data.batch.token_digest``), taken from the batch itself. The checker
knows nothing of layouts and trusts no number of the ledger. It makes every row again from the source data
and the order of samples, and compares digests. Where one differs, ``ledger_diagnosis`` looks for a deviation
that explains it, so that a report names the sample. A sample that no digest proves counts as lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from picotron_ray.data.batch import token_digest
from picotron_ray.data.ledger_diagnosis import Deviation, diagnose
from picotron_ray.data.ledger_line import LedgerLine, parse_line
from picotron_ray.data.samples import Dataset
from picotron_ray.data.shuffle import samples_between


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
    """

    steps: int
    samples: int
    lost: int
    repeated: int
    void: int
    wrong: tuple[str, ...]

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
            "wrong": list(self.wrong),
        }


@dataclass(slots=True)
class _Audit:
    """State of one check."""

    dataset: Dataset
    seed: int
    global_batch: int
    steps: int
    wrong: list[str]
    # step → times fed of each of its samples; only of steps met, so that a wild step number costs nothing
    fed: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    def feed(self, numbers: npt.NDArray[np.int64]) -> None:
        for step in np.unique(numbers // self.global_batch + 1).tolist():
            if step <= self.steps:
                inside = numbers[numbers // self.global_batch + 1 == step]
                counts = self.fed.setdefault(step, np.zeros(self.global_batch, np.int64))
                np.add.at(counts, inside - (step - 1) * self.global_batch, 1)

    def rows(self, first: int, last: int) -> npt.NDArray[np.int64]:
        return self.dataset.rows(samples_between(self.seed, first, last, self.dataset.samples))

    def line(self, line: LedgerLine) -> None:
        base = (line.step - 1) * self.global_batch
        wanted = (base, base + self.global_batch)
        if line.samples != wanted:
            self.wrong.append(f"{line.name} says samples {line.samples}, expected {wanted}")
        tokens = self.global_batch * self.dataset.sequence_length
        if line.tokens != tokens:
            self.wrong.append(f"{line.name} says {line.tokens} tokens, expected {tokens}")
        for replica, (first, last, digest) in enumerate(line.rows):
            name = f"{line.name}, replica {replica}"
            if not wanted[0] <= first <= last <= wanted[1]:
                self.wrong.append(f"{name} says rows {first}..{last}, outside of {wanted[0]}..{wanted[1]}")
            else:
                self.replica(name, first, last, digest)

    def replica(self, name: str, first: int, last: int, digest: str) -> None:
        """Check the digest of one replica's rows, and count what it really fed."""
        if token_digest(self.rows(first, last)).hex() == digest:
            self.feed(np.arange(first, last))
            return
        low = max(0, first - self.global_batch)
        window = self.rows(low, last + self.global_batch)
        deviation: Deviation | None = diagnose(window, first - low, last - low, bytes.fromhex(digest))
        if deviation is None:
            self.wrong.append(f"{name} fed other tokens than rows {first}..{last} hold")
            return
        numbers = deviation.fed + low
        self.wrong.append(f"{name} {deviation.describe(low)}")
        self.feed(numbers)


def check(
    lines: Iterable[str | Mapping[str, Any]],
    dataset: Dataset,
    seed: int,
    global_batch: int,
    resumes: Sequence[tuple[int, int, int]] = (),
    last_step: int | None = None,
) -> LedgerReport:
    """Check a ledger against the source data.

    Args:
        lines: the ledger's lines, as text or parsed, in any order. Every line counts: the same line
            twice is a repeat.
        dataset: the training samples, built anew from the source.
        seed, global_batch: of the run.
        resumes: ``(term, n, resume_step)`` of the generations on the run's lineage. A line of an earlier
            generation and a later step than that is void.
        last_step: the last step that must be there; None: the newest one that is.
    """
    wrong: list[str] = []
    parsed = [line for at, raw in enumerate(lines, 1) if (line := parse_line(raw, at, wrong)) is not None]
    valid = [line for line in parsed if not _void(line, resumes)]
    steps = max((line.step for line in valid), default=0) if last_step is None else last_step
    audit = _Audit(dataset, seed, global_batch, steps, wrong)
    by_step: dict[int, list[LedgerLine]] = defaultdict(list)
    for line in valid:
        by_step[line.step].append(line)
    _missing_steps(by_step, steps, wrong)
    for step in sorted(by_step):
        if step > steps:
            wrong.append(f"{by_step[step][0].name} lies beyond the last step {steps}")
            continue
        if len(by_step[step]) > 1:
            names = ", ".join(f"{line.generation[0]}.{line.generation[1]}" for line in by_step[step])
            wrong.append(f"step {step} was fed {len(by_step[step])} times, by generations {names}")
        for line in by_step[step]:
            audit.line(line)
    samples = sum(int((counts > 0).sum()) for counts in audit.fed.values())
    return LedgerReport(
        steps=steps,
        samples=samples,
        lost=steps * global_batch - samples,
        repeated=sum(int(counts.sum()) for counts in audit.fed.values()) - samples,
        void=len(parsed) - len(valid),
        wrong=tuple(wrong),
    )


def _void(line: LedgerLine, resumes: Sequence[tuple[int, int, int]]) -> bool:
    return any(line.generation < (term, n) and line.step > resume for term, n, resume in resumes)


def _missing_steps(by_step: Mapping[int, Any], steps: int, wrong: list[str]) -> None:
    """One finding per run of steps without a line."""
    present = [0, *sorted(step for step in by_step if step <= steps), steps + 1]
    for before, after in pairwise(present):
        missing = range(before + 1, after)
        if len(missing) == 1:
            wrong.append(f"no line for step {missing[0]}")
        elif missing:
            wrong.append(f"no line for steps {missing[0]} to {missing[-1]}")
