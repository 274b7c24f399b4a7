"""Packed rows of a token stream, made once per node and memory-mapped by every worker.

``<cache>/packed-<key>/`` holds an ``.npy`` of each array of `PackedRows` and `Pieces`, and ``meta.json``. The
key is a hash of what decides: the stream's digest, the seed, the row's length, its slots and what becomes of
long documents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from picotron_ray.data.cache_folder import open_or_make
from picotron_ray.data.memmap import SCAN_TOKENS
from picotron_ray.data.plan.buckets import fill_buckets
from picotron_ray.data.plan.packing import LongDocuments, Numbers, PackedRows, Pieces, pack, pieces_of
from picotron_ray.data.samples import Tokens
from picotron_ray.errors import DataError

VERSION = 3
"""Version of the files."""
ROWS_VERSION = 1
"""Version of the rows: changing how they are made changes every run of the same seed."""
_ARRAYS = ("starts", "lengths", "offsets", "order", "slots", "predicted", "counted")


@dataclass(frozen=True, slots=True)
class PackRequest:
    """Request for a stream's rows: all that decides how it is packed.

    Fields:
        digest: of the stream, and its name among several.
        end: token id that ends a document.
        sequence_length: predicted tokens of a row.
        seed: of the order in which documents are taken.
        long_documents: what becomes of those that no row holds; None: they are refused.
        widths: slots of length buckets, ascending (`buckets`); none: documents follow each other.
        most: documents of a row at most; None: as many as fit.
    """

    digest: str
    end: int
    sequence_length: int
    seed: int
    long_documents: LongDocuments | None
    widths: tuple[int, ...] = ()
    most: int | None = None

    @property
    def room(self) -> int:
        """Most tokens of a document in a row."""
        return self.widths[-1] if self.widths else self.sequence_length + 1

    @property
    def way(self) -> str:
        """Name how rows are made of a stream."""
        most = "" if self.most is None else f"/at most {self.most}"
        if self.widths:
            return f"buckets {self.widths}/{self.long_documents}{most}/{ROWS_VERSION}"
        return f"packed/{self.long_documents}{most}/{ROWS_VERSION}"

    @property
    def key(self) -> str:
        words = (VERSION, self.digest, self.end, self.sequence_length, self.seed, self.way)
        return xxhash.xxh3_128_hexdigest(json.dumps(words).encode())


def packed_rows(
    tokens: Tokens,
    request: PackRequest,
    folder: Path,
    ends: Numbers | None = None,
    mask: Tokens | None = None,
) -> tuple[Pieces, PackedRows]:
    """Open the packed rows of a stream in the cache ``folder``, or make them there.

    Args:
        ends: where each document ends; None: behind each token that is ``request.end``.
        mask: one byte per token, 1 where it counts as a target; None: all do. It belongs to the digest.

    Raises DataError for documents that are too long where nothing is asked for those, for a stream without a
    document of two tokens, or a cache that cannot be written.
    """
    place = folder / f"packed-{request.key}"
    return open_or_make(place, "packed rows", _open, lambda fresh: _build(tokens, request, fresh, ends, mask))


def document_borders(tokens: Tokens, end: int) -> Numbers:
    """Find the first token of each document, and the end of the stream: int64, ascending."""
    parts = [np.zeros(1, np.int64)]
    for at in range(0, len(tokens), SCAN_TOKENS):
        parts.append(np.flatnonzero(tokens[at : at + SCAN_TOKENS] == end) + at + 1)
    return _closed(np.concatenate(parts), len(tokens))


def _closed(borders: Numbers, tokens: int) -> Numbers:
    """Let what is left of a document at the stream's end be one."""
    return borders if borders[-1] == tokens else np.append(borders, tokens)


def _build(
    tokens: Tokens, request: PackRequest, folder: Path, ends: Numbers | None, mask: Tokens | None
) -> None:
    """Pack into an empty folder."""
    room = request.room
    if ends is None:
        borders = document_borders(tokens, request.end)
    else:
        borders = _closed(np.concatenate([np.zeros(1, np.int64), ends]), len(tokens))
    longest = int(np.diff(borders).max()) if len(borders) > 1 else 0
    if longest > room and request.long_documents is None:
        count = int((np.diff(borders) > room).sum())
        raise DataError(
            f"data.long_documents: {count} documents are longer than the {room} tokens that one may have, the"
            f" longest has {longest}; say split, truncate or drop, or give a larger data.sequence_length"
        )
    pieces = pieces_of(borders, room, request.long_documents or "split")
    if not len(pieces.lengths):
        raise DataError("data.batching: no document has two tokens and fits a row, so there is none to pack")
    rows = _rows(pieces, request)
    slots = np.zeros(0, np.int64) if rows.slots is None else rows.slots
    predicted = _row_sums(pieces.lengths - 1, rows)
    counted = predicted if mask is None else _row_sums(_counted(pieces, mask), rows)
    arrays = (pieces.starts, pieces.lengths, rows.offsets, rows.order, slots, predicted, counted)
    for name, array in zip(_ARRAYS, arrays, strict=True):
        np.save(folder / f"{name}.npy", array)
    sizes = {name: len(array) for name, array in zip(_ARRAYS, arrays, strict=True)}
    meta = {"cut": pieces.cut, "parted": pieces.parted, "sizes": sizes}
    (folder / "meta.json").write_text(json.dumps(meta) + "\n", "utf-8")


def _counted(pieces: Pieces, mask: Tokens) -> Numbers:
    """Count the targets of each piece that count in the loss."""
    pairs = zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
    sums = (int(mask[start + 1 : start + length].sum()) for start, length in pairs)
    return np.fromiter(sums, np.int64, len(pieces.starts))


def _row_sums(of_pieces: Numbers, rows: PackedRows) -> Numbers:
    return np.add.reduceat(of_pieces[rows.order], rows.offsets[:-1]).astype(np.int64)


def _rows(pieces: Pieces, request: PackRequest) -> PackedRows:
    if request.widths:
        room = request.sequence_length + 1
        return fill_buckets(pieces.lengths, room, request.seed, request.widths, request.most)
    return pack(pieces.lengths, request.room, request.seed, request.most)


def _open(place: Path) -> tuple[Pieces, PackedRows] | None:
    """Open what was made; None where there is nothing or it is damaged."""
    try:
        meta = json.loads((place / "meta.json").read_text("utf-8"))
        arrays = [np.load(place / f"{name}.npy", mmap_mode="r") for name in _ARRAYS]
        sizes = [int(meta["sizes"][name]) for name in _ARRAYS]
        cut, parted = int(meta["cut"]), int(meta["parted"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, EOFError):
        return None
    if [len(array) for array in arrays] != sizes or {array.dtype for array in arrays} != {np.dtype("i8")}:
        return None
    starts, lengths, offsets, order, slots, predicted, counted = arrays
    rows = PackedRows(offsets, order, slots if len(slots) else None, predicted, counted)
    return Pieces(starts, lengths, cut, parted), rows
