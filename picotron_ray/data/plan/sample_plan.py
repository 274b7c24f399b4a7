"""Plan of a run's samples: which rows each step feeds, as a pure function of the config, seed and step.

Rows have global numbers, counted from the start of the run. Whoever knows the plan knows what any row holds,
without the rows before it: ranks of any layout, a run that goes on, and the ledger's check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from picotron_ray.data.plan.advance_rule import AdvanceRule, Starts
from picotron_ray.data.samples import SampleSet
from picotron_ray.data.shuffle import Index, samples_between


class SamplePlan(Protocol):
    """Order of samples. Equal plans feed equal rows."""

    def numbers(self, step: int) -> tuple[int, int]:
        """Return the half-open range of global row numbers that ``step`` (1-based) feeds."""

    def samples(self, first: int, last: int) -> Index:
        """Return the dataset's samples in the rows ``first .. last`` (half-open), int64."""


@dataclass(frozen=True, slots=True)
class UniformPlan:
    """Order version 1: each epoch a permutation of all samples (`data.shuffle`), so many of them a step.

    Fields:
        seed: of the permutations.
        global_batch: rows of a step.
        count: samples of one epoch; 0 where only rows are numbered.

    >>> plan = UniformPlan(seed=0, global_batch=4, count=6)
    >>> plan.numbers(2)
    (4, 8)
    >>> sorted(plan.samples(0, 6).tolist())
    [0, 1, 2, 3, 4, 5]
    """

    seed: int
    global_batch: int
    count: int

    def numbers(self, step: int) -> tuple[int, int]:
        """Return the half-open range of global row numbers that ``step`` (1-based) feeds."""
        return (step - 1) * self.global_batch, step * self.global_batch

    def samples(self, first: int, last: int) -> Index:
        """Return the dataset's samples in the rows ``first .. last`` (half-open), int64."""
        return samples_between(self.seed, first, last, self.count)


@dataclass(frozen=True, slots=True, eq=False)
class StagedPlan:
    """Order version 3: rows of a plan that follows from where stages begin.

    Fields:
        made: the plan by those starts.
        starts: of the stages that have begun, or will at a known step.
        widths: tokens of a piece in each stage; none: rows are whole.
        rule: by which the run itself decides where stages begin; None: they are known.
    """

    made: Callable[[Starts], SamplePlan]
    starts: Starts
    widths: tuple[int, ...] = ()
    rule: AdvanceRule | None = None

    def numbers(self, step: int) -> tuple[int, int]:
        """Return the half-open range of global row numbers that ``step`` (1-based) feeds."""
        return self.made(self.starts).numbers(step)

    def samples(self, first: int, last: int) -> Index:
        """Return the dataset's samples in the rows ``first .. last`` (half-open), int64."""
        return self.made(self.starts).samples(first, last)

    def stage(self, step: int) -> int:
        """Return the number of the stage that feeds a step (1-based)."""
        return int(np.searchsorted(self.starts, step - 1, side="right")) - 1

    def width(self, step: int) -> int | None:
        """Return the tokens of a piece in the rows of a step (1-based); None: rows are always whole."""
        return self.widths[self.stage(step)] if self.widths else None

    def moved(self, starts: Starts) -> StagedPlan:
        """Return the plan of stages that begin elsewhere."""
        return replace(self, starts=starts)


class StageClock(Protocol):
    """Record of where a curriculum's stages begin, while a run decides it (`data.plan.advance`)."""

    def starts_for(self, step: int) -> Starts:
        """Return the starts of stages begun before ``step``, waiting until they are known."""

    def stop(self) -> None:
        """Let whoever waits go."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Samples of a run in the order in which it feeds them.

    Fields:
        dataset, plan: samples, and which of them each step feeds.
        stages: of a curriculum that the run itself advances; None: the plan knows all steps.
    """

    dataset: SampleSet
    plan: SamplePlan
    stages: StageClock | None = None

    @classmethod
    def uniform(cls, dataset: SampleSet, seed: int, global_batch: int) -> Feed:
        """Feed all of a dataset in each epoch, shuffled (`UniformPlan`)."""
        return cls(dataset, UniformPlan(seed, global_batch, dataset.samples))

    def known(self, step: int) -> Feed:
        """Return the feed whose plan holds for ``step``; waits where the run has yet to decide it."""
        if self.stages is None or not isinstance(self.plan, StagedPlan):
            return self
        return Feed(self.dataset, self.plan.moved(self.stages.starts_for(step)))

    def rows(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Read the tokens of rows: int64 ``[last - first, sequence_length + 1]``."""
        return self.dataset.rows(self.plan.samples(first, last))

    def width(self, step: int) -> int | None:
        """Return the tokens of the pieces that a step's rows are read as; None: they are whole."""
        return self.plan.width(step) if isinstance(self.plan, StagedPlan) else None

    def stage(self, step: int) -> int:
        """Return the number of the curriculum's stage that feeds a step, from 1 on; 0: there is none."""
        return self.plan.stage(step) + 1 if isinstance(self.plan, StagedPlan) else 0

    def tokens_until(self, step: int) -> int:
        """Count the tokens that a run has predicted after ``step``, by the mean of an epoch's rows."""
        return round(self.plan.numbers(step)[1] * self.dataset.mean_tokens)

    def totals(self, first: int, last: int) -> tuple[int, int | None]:
        """Count the predicted tokens of rows, and those that count in the loss; None: all do."""
        return self.dataset.totals(self.plan.samples(first, last))

    def stop(self) -> None:
        """Let a thread go that waits for a stage to be decided."""
        if self.stages is not None:
            self.stages.stop()
