"""Files of a token cache: the tokens of both parts of a source, and what belongs to them.

``{train,held_out}.u16``, or ``.u32`` for vocabularies above 65,536; ``.mask``, a byte per token, where only
some count; ``.ends``, 8 bytes for each document: where the next one begins, in tokens. Byte caches need no
ends: their id 256 ends a document and means nothing else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from picotron_ray.data.tokenise import TokenPiece

SPLITS = ("train", "held_out")
MASK, END = np.dtype("u1"), np.dtype("<i8")
SMALL_VOCABULARY = 1 << 16  # ids below it fit two bytes


class CacheForm(NamedTuple):
    """Form of a cache.

    Fields:
        vocabulary: ids are below it.
        masked: whether only some tokens count.
        ended: whether documents are told apart by their ends.
        end: id that ends a document.
    """

    vocabulary: int
    masked: bool
    ended: bool
    end: int

    @property
    def kinds(self) -> dict[str, np.dtype[Any]]:
        """Types of items by the suffix of their file: the tokens' first."""
        small = self.vocabulary <= SMALL_VOCABULARY
        kinds: dict[str, np.dtype[Any]] = {"u16": np.dtype("<u2")} if small else {"u32": np.dtype("<u4")}
        kinds |= {"mask": MASK} if self.masked else {}
        return kinds | ({"ends": END} if self.ended else {})


class SideWriter:
    """One part's open files, and the document that is being written."""

    def __init__(self, form: CacheForm, streams: dict[str, BinaryIO]) -> None:
        self._form, self._streams = form, streams
        self._token = next(iter(form.kinds.values()))
        self._last = -1  # of the document; -1: nothing was written of it
        self._counts = 0
        self._tokens = 0

    def add(self, piece: TokenPiece) -> bool:
        """Write a piece; returns whether a document ended with it. One without a token leaves no trace."""
        if len(piece.ids):
            self._put(piece.ids, piece.counted)
        if not piece.last or self._last < 0:
            return False
        if self._last != self._form.end:
            self._put(np.array([self._form.end]), np.array([self._counts], np.uint8))
        if self._form.ended:
            self._streams["ends"].write(np.array([self._tokens], END).data)
        self._last = -1
        return True

    def _put(self, ids: Any, counted: Any) -> None:
        tokens = self._streams[next(iter(self._form.kinds))]
        tokens.write(np.ascontiguousarray(ids, self._token).data)
        if self._form.masked:
            self._streams["mask"].write(np.ascontiguousarray(counted, MASK).data)
            self._counts = int(counted[-1])
        self._last, self._tokens = int(ids[-1]), self._tokens + len(ids)


def write_splits(pieces: Iterable[TokenPiece], form: CacheForm, fraction: float, folder: Path) -> bool:
    """Write both parts: by the hash of each document's key, or by position where one would be empty.

    A document of no token leaves no trace. Its end is not written twice, where its text ends with it.

    Args:
        fraction: share that is held out.

    Returns False where there was no token at all.
    """
    with ExitStack() as opened:
        sides = []
        for name in SPLITS:
            files = {
                kind: opened.enter_context((folder / f"{name}.{kind}").open("wb")) for kind in form.kinds
            }
            sides.append(SideWriter(form, dict(files)))
        for piece in pieces:
            sides[held_out(piece.key, fraction)].add(piece)
    return fill_both(form, fraction, folder)


def fill_both(form: CacheForm, fraction: float, folder: Path) -> bool:
    """Hold the last share of the stream out, where documents left one of both parts empty.

    Returns False where there is no token at all.
    """
    suffix, token = next(iter(form.kinds.items()))
    paths = [folder / f"{name}.{suffix}" for name in SPLITS]
    if all(path.stat().st_size for path in paths):
        return True
    # One document, or a handful of them on one side: the last share of the stream is held out instead.
    full = max(paths, key=lambda path: path.stat().st_size)
    size = full.stat().st_size // token.itemsize
    if not size:
        return False
    cut = size - tail_tokens(size, fraction)
    for kind, dtype in form.kinds.items():
        train, held = (folder / f"{name}.{kind}" for name in SPLITS)
        if full != paths[0]:
            os.replace(held, train)
        if kind == "ends":
            _part_ends(train, held, cut)
        else:
            _move_tail(train, held, cut * dtype.itemsize)
    return True


def held_out(key: bytes, fraction: float) -> bool:
    """Whether a document belongs to the held-out part: its key's hash falls into that share of all hashes."""
    return xxhash.xxh3_64_intdigest(key) < fraction * 2.0**64


def tail_tokens(tokens: int, fraction: float) -> int:
    """Count the tokens at the end of a stream that are held out where documents cannot decide it."""
    return round(tokens * fraction)


def _move_tail(train: Path, held: Path, at: int) -> None:
    with train.open("r+b") as source, held.open("wb") as target:
        source.seek(at)
        shutil.copyfileobj(source, target)
        source.truncate(at)


def _part_ends(train: Path, held: Path, cut: int) -> None:
    """Part the ends of documents at a token; what is left of one document ends where its part does."""
    ends = np.fromfile(train, END)
    ends[ends <= cut].tofile(train)
    (ends[ends > cut] - cut).tofile(held)
