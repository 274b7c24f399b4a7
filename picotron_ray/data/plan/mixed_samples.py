"""Samples of several sources as one set: those of the first source, then those of the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from picotron_ray.data.samples import SampleSet

Numbers = npt.NDArray[np.int64]
_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True, slots=True)
class MixedSamples:
    """Samples of one length from several sets.

    Fields:
        parts: the sets, in the order of their sources.
        shares: of the rows that a run feeds, to say how many tokens a row has on the average.
    """

    parts: tuple[SampleSet, ...]
    shares: tuple[float, ...]

    @property
    def sequence_length(self) -> int:
        """Predicted tokens of a row, padding included; a row holds one more."""
        return self.parts[0].sequence_length

    @property
    def samples(self) -> int:
        """Samples of all sets."""
        return sum(part.samples for part in self.parts)

    @property
    def mean_tokens(self) -> float:
        """Predicted tokens of a row, padding left out, on the average."""
        pairs = zip(self.parts, self.shares, strict=True)
        return sum(part.mean_tokens * share for part, share in pairs) / sum(self.shares)

    def rows(self, samples: Numbers) -> Numbers:
        """Tokens of the given samples, ``[len(samples), sequence_length + 1]``, int64."""
        return self._joined(samples, self.sequence_length + 1, np.int64, lambda part, mine: part.rows(mine))

    def counted(self, samples: Numbers) -> npt.NDArray[np.bool_] | None:
        """Mask of the targets that count, ``[len(samples), sequence_length]``; None: all do."""
        if all(part.counted(samples[:0]) is None for part in self.parts):
            return None

        def read(part: SampleSet, mine: Numbers) -> npt.NDArray[np.bool_]:
            found = part.counted(mine)
            return np.ones((len(mine), self.sequence_length), np.bool_) if found is None else found

        return self._joined(samples, self.sequence_length, np.bool_, read)

    def documents(self, samples: Numbers) -> npt.NDArray[np.int32] | None:
        """Number of each input's document, ``[len(samples), sequence_length]``; None: the tokens say."""
        if all(part.documents(samples[:0]) is None for part in self.parts):
            return None

        def read(part: SampleSet, mine: Numbers) -> npt.NDArray[np.int32]:
            found = part.documents(mine)
            assert found is not None, "all sets are made alike"
            return found

        return self._joined(samples, self.sequence_length, np.int32, read)

    def totals(self, samples: Numbers) -> tuple[int, int | None]:
        """Count the samples' predicted tokens, without padding, and those that count; None: all do."""
        found = [part.totals(mine) for part, mine, _ in self._split(samples)]
        tokens = sum(total for total, _ in found)
        if self.counted(samples[:0]) is None:
            return tokens, None
        return tokens, sum(total if counted is None else counted for total, counted in found)

    def _split(self, samples: Numbers) -> list[tuple[SampleSet, Numbers, npt.NDArray[np.intp]]]:
        """Each set that has some of the samples, their numbers there, and their places."""
        ends = np.array(list(accumulate(part.samples for part in self.parts)), np.int64)
        sources = np.searchsorted(ends, samples, side="right")
        found = []
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            part = self.parts[source]
            found.append((part, samples[places] - (ends[source] - part.samples), places))
        return found

    def _joined(
        self,
        samples: Numbers,
        width: int,
        kind: type[_Value],
        read: Callable[[SampleSet, Numbers], npt.NDArray[_Value]],
    ) -> npt.NDArray[_Value]:
        out = np.empty((len(samples), width), kind)
        for part, mine, places in self._split(samples):
            out[places] = read(part, mine)
        return out
