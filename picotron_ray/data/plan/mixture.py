"""Mixture of sources: which source each row of a run comes from, and which of its samples.

Rows are dealt in cycles. A cycle holds `CYCLE` rows, of which each source has its quota (its weight, rounded
by largest remainders), in an order shuffled by seed. So the shares of any long stretch are the weights, and
row ``n`` is found without the rows before it. Weights may change at given steps; the cycles begin anew there,
while each source goes on with the sample that follows its last one: within an epoch of a source no sample
comes twice, and none is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from picotron_ray.config.support.mixture import CYCLE
from picotron_ray.data.plan.order import SampleOrder
from picotron_ray.data.shuffle import Index, sample_index

MIXTURE_VERSION = 2
"""Version of the order: changing anything here changes every run of the same seed."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of a run over which the weights stay.

    Fields:
        first: global number of its first row.
        quotas: rows of each source in a cycle; 0: none.
    """

    first: int
    quotas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Dealer of rows to sources, by global row number.

    Fields:
        seed: of the order within cycles.
        stretches: ascending, the first one from row 0.
    """

    seed: int
    stretches: tuple[Stretch, ...]

    def deal(self, first: int, last: int) -> tuple[npt.NDArray[np.int64], Index]:
        """Say for the rows ``first .. last`` (half-open) from which source they come, and which of its rows.

        Returns: sources, and numbers that count the rows of each source from the start of the run.
        """
        sources, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while first < last:
            at = self._at(first)
            stop = min(last, self._end(at))
            cycle, position = divmod(first - self.stretches[at].first, CYCLE)
            stop = min(stop, first + CYCLE - position)
            dealt, ranks = _cycle(self.seed, at, cycle, self.stretches[at].quotas)
            mine = slice(position, position + stop - first)
            base = self._before(at) + cycle * np.asarray(self.stretches[at].quotas, np.int64)
            sources.append(dealt[mine].astype(np.int64))
            numbers.append(base[dealt[mine]] + ranks[mine])
            first = stop
        return np.concatenate(sources), np.concatenate(numbers)

    def used(self, rows: int) -> npt.NDArray[np.int64]:
        """Count the rows of each source among the first ``rows`` of the run."""
        at = self._at(max(0, rows - 1))
        stretch = self.stretches[at]
        cycles, rest = divmod(rows - stretch.first, CYCLE)
        total = self._before(at) + cycles * np.asarray(stretch.quotas, np.int64)
        if rest:
            dealt, _ = _cycle(self.seed, at, cycles, stretch.quotas)
            total = total + np.bincount(dealt[:rest], minlength=len(stretch.quotas))
        return total

    def _at(self, row: int) -> int:
        firsts = [stretch.first for stretch in self.stretches]
        return int(np.searchsorted(firsts, row, side="right")) - 1

    def _end(self, at: int) -> int:
        return self.stretches[at + 1].first if at + 1 < len(self.stretches) else 1 << 62

    def _before(self, at: int) -> npt.NDArray[np.int64]:
        """Rows of each source before a stretch."""
        return np.asarray(_rows_before(self, at), np.int64)


@lru_cache(maxsize=256)
def _rows_before(mixture: Mixture, at: int) -> tuple[int, ...]:
    total = np.zeros(len(mixture.stretches[0].quotas), np.int64)
    for number, (one, following) in enumerate(pairwise(mixture.stretches[: at + 1])):
        cycles, rest = divmod(following.first - one.first, CYCLE)
        total += cycles * np.asarray(one.quotas, np.int64)
        dealt, _ = _cycle(mixture.seed, number, cycles, one.quotas)
        total += np.bincount(dealt[:rest], minlength=len(total))
    return tuple(total.tolist())


@lru_cache(maxsize=8)
def _cycle(
    seed: int, stretch: int, cycle: int, shares: tuple[int, ...]
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    """Source of each row of a cycle, and its rank among the rows of that source in the cycle."""
    order = np.random.SeedSequence((seed, stretch)).generate_state(1, np.uint32)
    slots = sample_index(int(order[0]), cycle, np.arange(CYCLE), CYCLE)
    dealt = np.searchsorted(np.cumsum(shares), slots, side="right").astype(np.int16)
    ranks = np.empty(CYCLE, np.int32)
    for source in range(len(shares)):
        mine = dealt == source
        ranks[mine] = np.arange(int(mine.sum()), dtype=np.int32)
    return dealt, ranks


@dataclass(frozen=True, slots=True)
class MixturePlan:
    """Order version 2: rows of several sources, each in its own order.

    A sample's number counts the samples of the sources before its own, and those before it there.

    Fields:
        global_batch: rows of a step.
        orders: of each source's samples; their seeds follow from the run's seed and the source's name, so
            that the order within a source does not depend on the others.
        mixture: from which source each row comes.
    """

    global_batch: int
    orders: tuple[SampleOrder, ...]
    mixture: Mixture

    def numbers(self, step: int) -> tuple[int, int]:
        """Return the half-open range of global row numbers that ``step`` (1-based) feeds."""
        return (step - 1) * self.global_batch, step * self.global_batch

    def samples(self, first: int, last: int) -> Index:
        """Return the samples in the rows ``first .. last`` (half-open), int64."""
        sources, numbers = self.mixture.deal(first, last)
        found = np.empty(len(numbers), np.int64)
        before = 0
        for source, order in enumerate(self.orders):
            mine = sources == source
            if mine.any():  # the rows of one source are dealt in order
                low, high = int(numbers[mine][0]), int(numbers[mine][-1]) + 1
                found[mine] = before + order.samples(low, high)
            before += order.count
        return found

    def dry_step(self, source: int, steps: int) -> int | None:
        """Return the step that needs more rows of a source than one epoch has; None: none of ``steps``."""
        count = self.orders[source].count
        if self.mixture.used(steps * self.global_batch)[source] <= count:
            return None
        low, high = 0, steps  # enough after low, too many after high
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.mixture.used(middle * self.global_batch)[source] <= count
            low, high = (middle, high) if enough else (low, middle)
        return high
