"""Order of one source's samples: which one its row ``n`` is, as a pure function of the seed and ``n``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from picotron_ray.data.shuffle import Index, samples_between


class SampleOrder(Protocol):
    """Order of a source's samples, by numbers that count its rows from the start of the run."""

    @property
    def count(self) -> int:
        """Samples of the source."""

    def samples(self, first: int, last: int) -> Index:
        """Return the samples in the source's rows ``first .. last`` (half-open), int64."""


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Each epoch a permutation of all samples (`data.shuffle`).

    Fields:
        seed: of the permutations.
        count: samples of the source.
    """

    seed: int
    count: int

    def samples(self, first: int, last: int) -> Index:
        """Return the samples in the source's rows ``first .. last`` (half-open), int64."""
        return samples_between(self.seed, first, last, self.count)
