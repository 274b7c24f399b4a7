"""Packing: whole documents side by side in rows of one length, so that little of a row is padding.

Documents are taken in an order shuffled by seed, `WINDOW` of them at a time. The longest of a window goes
first, each into the fullest row that has room for it (best-fit decreasing, Johnson 1974). Rows that are full
or that no later window filled in time are closed. Which documents share a row depends on the seed and the
lengths alone: rows are made once, and their order is shuffled in each epoch as that of other samples.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from picotron_ray.data.shuffle import sample_index

WINDOW = 4096
"""Documents that are sorted together: the order of rows stays random, and nothing grows with the data."""
OPEN_ROWS = 1024
"""Rows with room that wait for documents of later windows; the fullest ones are closed beyond that."""
LongDocuments = Literal["split", "truncate", "drop"]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of a token stream, each a document or a part of one.

    Fields:
        starts: int64, first token of each.
        lengths: int64, tokens of each, at least 2: a piece of one predicts nothing.
        cut: documents of which something was left out.
        parted: documents that were split.
    """

    starts: Numbers
    lengths: Numbers
    cut: int = 0
    parted: int = 0


def pieces_of(borders: Numbers, room: int, long_documents: LongDocuments) -> Pieces:
    """Cut documents into pieces of at most ``room`` tokens.

    Args:
        borders: int64, first token of each document, and the end of the stream.
        room: most tokens of a piece, at least 2.
        long_documents: ``split``: a document beyond that becomes several pieces, whose neighbours share one
            token, so that each token is predicted once; ``truncate``: its beginning stays; ``drop``: it goes.
    """
    starts, lengths = borders[:-1], np.diff(borders)
    long = lengths > room
    if long_documents == "truncate":
        lengths = np.minimum(lengths, room)
    elif long_documents == "drop":
        starts, lengths = starts[~long], lengths[~long]
    else:
        starts, lengths = _split(starts, lengths, room)
    kept = lengths >= 2
    count = int(long.sum())
    left_out, parted = (0, count) if long_documents == "split" else (count, 0)
    return Pieces(starts[kept], lengths[kept], left_out, parted)


def _split(starts: Numbers, lengths: Numbers, room: int) -> tuple[Numbers, Numbers]:
    """Part what is too long; neighbouring pieces share a token."""
    step = room - 1
    counts = np.maximum(1, -(-(lengths - 1) // step))
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = np.repeat(starts, counts) + within * step
    ends = np.repeat(starts + lengths, counts)
    return firsts, np.minimum(ends - firsts, room)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows, each a list of pieces.

    Fields:
        offsets: int64 ``[rows + 1]``; row ``i`` holds ``order[offsets[i] : offsets[i + 1]]``.
        order: int64, numbers of pieces, row after row.
        slots: int64 ``[rows]``, tokens between the beginnings of a row's pieces; None: they follow each
            other.
        predicted, counted: int64 ``[rows]``, tokens of each row that are predicted, and that count in the
            loss; None: to be counted where asked for.
    """

    offsets: Numbers
    order: Numbers
    slots: Numbers | None = None
    predicted: Numbers | None = None
    counted: Numbers | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> Numbers:
        """Return the numbers of a row's pieces, in their places."""
        return self.order[self.offsets[number] : self.offsets[number + 1]]


def pack(lengths: Numbers, room: int, seed: int, most: int | None = None) -> PackedRows:
    """Pack pieces into rows of ``room`` tokens, at most ``most`` of them into one; None: as many as fit.

    >>> rows = pack(np.array([5, 3, 2, 6]), room=8, seed=0)
    >>> sorted(sorted(rows.row(at).tolist()) for at in range(len(rows)))
    [[0, 1], [2, 3]]
    """
    if len(lengths) and int(lengths.max()) > room:
        raise ValueError(f"saw a piece of {int(lengths.max())} tokens, expected at most {room}")
    closed = list(_rows(lengths, room, seed, most or room))
    counts = np.fromiter(map(len, closed), np.int64, len(closed))
    order = np.fromiter((piece for row in closed for piece in row), np.int64, int(counts.sum()))
    return PackedRows(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), order)


def _rows(lengths: Numbers, room: int, seed: int, most: int) -> Iterator[list[int]]:
    """Yield rows as they are closed."""
    waiting: list[tuple[int, int]] = []  # room left and a number that tells equal ones apart, ascending
    rows: dict[int, list[int]] = {}
    made = 0
    for window in _windows(len(lengths), seed):
        sizes = lengths[window]
        for at in np.argsort(-sizes, kind="stable").tolist():
            size, piece = int(sizes[at]), int(window[at])
            found = bisect_left(waiting, (size, -1))
            if found < len(waiting):
                left, number = waiting.pop(found)
            else:
                left, number, made = room, made, made + 1
                rows[number] = []
            rows[number].append(piece)
            if left - size >= 2 and len(rows[number]) < most:
                insort(waiting, (left - size, number))
            else:
                yield rows.pop(number)
        for _, number in waiting[: max(0, len(waiting) - OPEN_ROWS)]:  # those with the least room
            yield rows.pop(number)
        del waiting[: max(0, len(waiting) - OPEN_ROWS)]
    yield from (rows[number] for _, number in waiting)


def _windows(count: int, seed: int) -> Iterator[Numbers]:
    for first in range(0, count, WINDOW):
        yield sample_index(seed, 0, np.arange(first, min(count, first + WINDOW)), count)
