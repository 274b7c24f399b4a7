"""Samples of fixed length, cut from one stream of tokens.

Sample ``i`` is the tokens ``i x S .. i x S + S`` (S + 1 of them): neighbours share one token, so every
token after the first is predicted exactly once per epoch. Documents run on within a sample, with an
end-of-document token between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples of ``sequence_length`` + 1 tokens cut from ``tokens`` (1-d, usually memory-mapped).

    Fields:
        mask: one byte per token, 1 where it counts as a target; None: all do.
    """

    tokens: Tokens
    sequence_length: int
    mask: npt.NDArray[np.uint8] | None = None

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

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
