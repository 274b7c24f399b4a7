"""Samples of fixed length, cut from one stream of tokens.

Sample ``i`` is the tokens ``i x S .. i x S + S`` (S + 1 of them): neighbours share one token, so every
token after the first is predicted exactly once per epoch. Documents run on within a sample, with an
end-of-document token between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

PADDING = -1
"""Number of the document that padding is."""
Tokens = npt.NDArray[np.unsignedinteger[Any]]


class SampleSet(Protocol):
    """Samples of one length, each known by its number."""

    @property
    def sequence_length(self) -> int:
        """Predicted tokens of a row, padding included; a row holds one more."""

    @property
    def samples(self) -> int:
        """Samples of one epoch."""

    @property
    def mean_tokens(self) -> float:
        """Predicted tokens of a row, padding left out, on the average of an epoch."""

    def rows(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of the given samples, ``[len(samples), sequence_length + 1]``, int64."""

    def counted(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Mask of the targets that count, ``[len(samples), sequence_length]``; None: all do."""

    def documents(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """Number of each input's document within its row, ``[len(samples), sequence_length]``.

        `PADDING` behind the last one. None where the tokens say, or nobody asks.
        """

    def totals(self, samples: npt.NDArray[np.int64]) -> tuple[int, int | None]:
        """Count the samples' predicted tokens, without padding, and those that count; None: all do."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples of ``sequence_length`` + 1 tokens cut from ``tokens`` (1-d, usually memory-mapped).

    Fields:
        mask: one byte per token, 1 where it counts as a target; None: all do.
        ends: where each document ends in the stream (exclusive), ascending, for rows that keep documents
            apart; None: the tokens say, or nobody asks.
    """

    tokens: Tokens
    sequence_length: int
    mask: npt.NDArray[np.uint8] | None = None
    ends: npt.NDArray[np.int64] | None = None

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    @property
    def mean_tokens(self) -> float:
        """Predicted tokens of a row."""
        return float(self.sequence_length)

    def rows(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of the given samples, ``[len(samples), sequence_length + 1]``, int64."""
        width = self.sequence_length + 1
        out = np.empty((len(samples), width), np.int64)
        for row, sample in enumerate(samples):
            start = int(sample) * self.sequence_length
            out[row] = self.tokens[start : start + width]
        return out

    def counted(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Mask of the targets that count in the given samples, ``[len(samples), sequence_length]``.

        None where all do.
        """
        if self.mask is None:
            return None
        out = np.empty((len(samples), self.sequence_length), np.bool_)
        for row, sample in enumerate(samples):
            start = int(sample) * self.sequence_length + 1
            out[row] = self.mask[start : start + self.sequence_length]
        return out

    def documents(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """Number of each input's document within its row, ``[len(samples), sequence_length]``.

        None where it is left to the tokens.
        """
        if self.ends is None:
            return None
        starts = samples[:, None] * self.sequence_length
        found = np.searchsorted(self.ends, starts + np.arange(self.sequence_length), side="right")
        return (found - found[:, :1]).astype(np.int32)

    def totals(self, samples: npt.NDArray[np.int64]) -> tuple[int, int | None]:
        """Count the samples' predicted tokens, and those that count; None: all do."""
        counted = self.counted(samples)
        return len(samples) * self.sequence_length, None if counted is None else int(counted.sum())
