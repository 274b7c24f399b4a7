"""Samples that are rows of whole documents: what packing made, read from the token stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from picotron_ray.data.plan.packing import PackedRows, Pieces
from picotron_ray.data.samples import PADDING, Tokens


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples of packed documents. Each begins anew: its first token is no target, and padding is none.

    Fields:
        tokens: the stream, usually memory-mapped.
        sequence_length: predicted tokens of a row; a row holds one more.
        pieces, packed: which stretches of the stream stand in which row.
        padding: token id behind the last piece of a row.
        mask: one byte per token of the stream, 1 where it counts as a target; None: all do.
        mean_tokens: predicted tokens of a row, padding left out, on the average of an epoch; summed once, as
            each step asks.
    """

    tokens: Tokens
    sequence_length: int
    pieces: Pieces
    packed: PackedRows
    padding: int
    mask: npt.NDArray[np.uint8] | None = None
    mean_tokens: float = field(init=False)

    def __post_init__(self) -> None:
        mean = float((self.pieces.lengths - 1).sum()) / max(1, self.samples)
        object.__setattr__(self, "mean_tokens", mean)

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return len(self.packed)

    def rows(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of the given samples, ``[len(samples), sequence_length + 1]``, int64."""
        out = np.full((len(samples), self.sequence_length + 1), self.padding, np.int64)
        for row, sample in enumerate(samples.tolist()):
            for at, start, length in self._stretches(sample):
                out[row, at : at + length] = self.tokens[start : start + length]
        return out

    def counted(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mask of the targets that count in the given samples, ``[len(samples), sequence_length]``."""
        out = np.zeros((len(samples), self.sequence_length), np.bool_)
        for row, sample in enumerate(samples.tolist()):
            for at, start, length in self._stretches(sample):
                mine = slice(at, at + length - 1)  # the target in place i is the row's token i + 1
                out[row, mine] = True if self.mask is None else self.mask[start + 1 : start + length]
        return out

    def documents(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Number of each input's piece within its row."""
        out = np.full((len(samples), self.sequence_length), PADDING, np.int32)
        for row, sample in enumerate(samples.tolist()):
            for number, (at, _, length) in enumerate(self._stretches(sample)):
                out[row, at : at + length] = number
        return out

    def totals(self, samples: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Count the samples' predicted tokens, without padding, and those that count."""
        packed = self.packed
        known = packed.predicted if self.mask is None else packed.counted
        if packed.predicted is not None and known is not None:
            return int(packed.predicted[samples].sum()), int(known[samples].sum())
        mine = np.concatenate([self.packed.row(sample) for sample in samples.tolist()] or [samples[:0]])
        predicted = int((self.pieces.lengths[mine] - 1).sum())
        return predicted, predicted if self.mask is None else int(self.counted(samples).sum())

    def told(self) -> str:
        """Say how full the rows are, and what became of long documents."""
        lengths, room = self.pieces.lengths, self.sequence_length + 1
        full = float(lengths.sum()) / (self.samples * room)
        words = f"{len(lengths)} documents or parts of them put into {self.samples} rows of {room} tokens"
        words += f", {full:.1%} full"
        if self.pieces.cut:
            words += f"; {self.pieces.cut} documents were cut or left out as too long"
        if self.pieces.parted:
            words += f"; {self.pieces.parted} longer ones were split"
        return words

    def places(self, sample: int) -> npt.NDArray[np.int64]:
        """Return where in the stream each token of a row stands, ``[sequence_length + 1]``; -1: padding."""
        out = np.full(self.sequence_length + 1, -1, np.int64)
        for at, start, length in self._stretches(sample):
            out[at : at + length] = np.arange(start, start + length)
        return out

    def _stretches(self, sample: int) -> list[tuple[int, int, int]]:
        """Place in the row, start in the stream, and length of a row's pieces."""
        mine = self.packed.row(sample)
        starts, lengths = self.pieces.starts[mine], self.pieces.lengths[mine]
        if self.packed.slots is None:
            places = np.cumsum(lengths) - lengths
        else:
            places = np.arange(len(mine)) * self.packed.slots[sample]
        return list(zip(places.tolist(), starts.tolist(), lengths.tolist(), strict=True))
