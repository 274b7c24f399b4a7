"""Counts of a ledger's check: how often each sample was fed, and which steps have a line.

Both are kept as intervals, so that they take the room of what is irregular (a loss, a repeat, a line out of
order), and none for the steps and samples in between: a run of weeks is checked in the memory of a short one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Generation = tuple[int, int]


class Feedings:
    """Counts of how often each sample was fed, by the numbers at which they change.

    >>> fed = Feedings()
    >>> for first, last in ((0, 4), (4, 8), (6, 8), (9, 10)):
    ...     fed.add(first, last)
    >>> fed.totals(10)
    (9, 11)
    >>> len(fed)
    5
    """

    def __init__(self) -> None:
        self._changes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, first: int, last: int) -> None:
        """Count the samples ``first .. last``, without the last, once more."""
        self._change(first, 1)
        self._change(last, -1)

    def add_each(self, numbers: npt.NDArray[np.int64]) -> None:
        """Count each of some samples once more."""
        for number in numbers.tolist():
            self.add(number, number + 1)

    def totals(self, end: int) -> tuple[int, int]:
        """Number of distinct samples below ``end`` that were fed, and of their feedings."""
        samples = feedings = at = count = 0
        for number in sorted(self._changes):
            length = max(0, min(number, end) - at)
            samples += length if count else 0
            feedings += length * count
            at, count = number, count + self._changes[number]
        return samples, feedings

    def _change(self, number: int, by: int) -> None:
        after = self._changes.get(number, 0) + by
        if after:
            self._changes[number] = after
        else:
            self._changes.pop(number, None)


class Lines:
    """Steps that have a line, as runs of steps in the order in which their lines came."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, Generation]] = []  # first, last, both inclusive

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, step: int, generation: Generation) -> None:
        """Count one line of a step."""
        if self._runs:
            first, last, writer = self._runs[-1]
            if (step, generation) == (last + 1, writer):
                self._runs[-1] = (first, step, writer)
                return
        self._runs.append((step, step, generation))

    def last(self) -> int:
        """Newest step that has a line; 0 without any."""
        return max((last for _, last, _ in self._runs), default=0)

    def missing(self, steps: int) -> Iterator[range]:
        """Each run of the steps 1 to ``steps`` without a line; no line is of a later step."""
        at = 1
        for first, last, _ in [*sorted(self._runs), (steps + 1, steps + 1, None)]:
            if first > at:
                yield range(at, first)
            at = max(at, last + 1)

    def repeated(self) -> Iterator[tuple[int, list[Generation]]]:
        """Steps with several lines, in order, each with the generations of those in the order they came."""
        # within a run no step is twice, so runs in their order give a step's lines in theirs
        starts: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        for index, (first, last, _) in enumerate(self._runs):
            starts[first].append(index)
            ends[last + 1].append(index)
        open_runs: set[int] = set()
        borders = sorted({*starts, *ends})
        for border, following in pairwise(borders):
            open_runs = (open_runs - set(ends[border])) | set(starts[border])
            if len(open_runs) > 1:
                generations = [self._runs[index][2] for index in sorted(open_runs)]
                for step in range(border, following):
                    yield step, generations
