"""Documents as token ids, a bounded part of them at a time.

Documents wait until they have some millions of characters together; a tokenizer of a file then encodes them
on several cores. A longer document is cut into parts that are encoded each by itself: at a line's end between
two characters that are no white space, which the usual tokenizers do not join anyway; else at a line's end;
else anywhere.

A token counts in the loss where one of the bytes that it stands for does.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.fill_middle import MiddleMover, Woven
from picotron_ray.data.jsonl_record import Span
from picotron_ray.data.sources import Document
from picotron_ray.data.tokenizer import ByteTokenizer, Ids, Tokenizer

PART_CHARACTERS = 4 << 20
MOST_TRIES = 1000  # line ends that are looked at to find a good one
Mask = npt.NDArray[np.uint8]


class TokenPiece(NamedTuple):
    """Some of a document's tokens, without its end.

    Fields:
        key: the document's split key.
        counted: 1 for each token that counts, else 0; None: all do.
        last: whether it is the document's last piece.
    """

    key: bytes
    ids: npt.NDArray[np.integer]
    counted: Mask | None
    last: bool


class _Waiting(NamedTuple):
    key: bytes
    woven: Woven
    counted: tuple[Span, ...] | None
    last: bool


class Encoder:
    """Turns documents into tokens, as a source's config says."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        """Raises DataError where the tokenizer lacks tokens that the config names."""
        self._tokenizer, self._special = tokenizer, data.chat_template is not None
        asked = data.fill_in_the_middle
        self._mover = None if asked is None else MiddleMover.of(asked, tokenizer)

    def pieces(self, documents: Iterable[Document]) -> Iterator[TokenPiece]:
        """Encode all documents, in their order."""
        if isinstance(self._tokenizer, ByteTokenizer):
            yield from _byte_pieces(documents)
            return
        waiting: list[_Waiting] = []
        size = 0
        for document in documents:
            first = True
            # ranges that count are those of the whole record, which is in memory anyway
            limit = PART_CHARACTERS if document.counted is None else sys.maxsize
            for text, last in parts_of(document.pieces, limit):
                whole = first and last
                woven = self._mover.moved(text) if self._mover and whole else Woven((text,), ((),))
                waiting.append(_Waiting(document.key, woven, document.counted, last))
                size, first = size + len(text), False
                if size >= PART_CHARACTERS:
                    yield from self._encoded(waiting)
                    waiting, size = [], 0
        yield from self._encoded(waiting)

    def _encoded(self, waiting: list[_Waiting]) -> Iterator[TokenPiece]:
        texts = [text for item in waiting for text in item.woven.texts]
        if waiting and waiting[0].counted is not None:  # records are whole
            found = self._tokenizer.encode_with_offsets(texts, self._special)
            for item, (ids, offsets) in zip(waiting, found, strict=True):
                yield TokenPiece(item.key, ids, mask_of(offsets, item.counted or ()), item.last)
            return
        encoded = iter(self._tokenizer.encode(texts, self._special))
        for item in waiting:
            parts: list[Ids] = []
            for before in item.woven.before:
                parts += [np.array(before, np.int64), next(encoded)]
            yield TokenPiece(item.key, np.concatenate(parts), None, item.last)


def mask_of(offsets: Ids, counted: tuple[Span, ...]) -> Mask:
    """Return 1 for each token of which a byte lies in one of the ranges.

    Args:
        offsets: range of bytes of each token, ``[tokens, 2]``.
        counted: ranges that ascend and do not overlap.

    >>> mask_of(np.array([[0, 2], [2, 4], [4, 4], [4, 6]]), ((1, 2), (4, 5))).tolist()
    [1, 0, 0, 1]
    """
    if not counted:
        return np.zeros(len(offsets), np.uint8)
    starts, ends = np.array(counted, np.int64).T
    at = np.searchsorted(ends, offsets[:, 0], side="right")  # the first range that ends behind its start
    begins = np.append(starts, np.iinfo(np.int64).max)[at]
    return ((begins < offsets[:, 1]) & (offsets[:, 0] < offsets[:, 1])).astype(np.uint8)


def parts_of(pieces: Iterable[bytes], limit: int) -> Iterator[tuple[str, bool]]:
    """Yield the text of a document in parts of at most ``limit`` characters, and whether each is the last.

    Where it is cut depends on the text alone. Bytes that are no UTF-8 become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = ""
    for piece in pieces:
        held += decoder.decode(piece)
        while len(held) > limit:
            at = cut_place(held, limit)
            yield held[:at], False
            held = held[at:]
    held += decoder.decode(b"", final=True)
    while len(held) > limit:
        at = cut_place(held, limit)
        yield held[:at], False
        held = held[at:]
    yield held, True


def cut_place(text: str, limit: int) -> int:
    """Find where a text is cut: at most ``limit`` characters from its start.

    >>> cut_place("one\\n\\ntwo\\nthree", 12), cut_place("one\\n  two", 6), cut_place("onetwo", 4)
    (9, 4, 4)
    """
    place = fallback = text.rfind("\n", 1, limit)
    for _ in range(MOST_TRIES):
        if place < 1:
            break
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
        place = text.rfind("\n", 1, place)
    return fallback + 1 if fallback > 0 else limit


def _byte_pieces(documents: Iterable[Document]) -> Iterator[TokenPiece]:
    """Bytes as ids, as they are read."""
    nothing = np.zeros(0, np.uint8)
    for document in documents:
        at = 0
        for piece in document.pieces:
            counted = None
            if document.counted is not None:
                places = np.arange(at, at + len(piece), dtype=np.int64)
                counted = mask_of(np.stack([places, places + 1], 1), document.counted)
            yield TokenPiece(document.key, np.frombuffer(piece, np.uint8), counted, last=False)
            at += len(piece)
        yield TokenPiece(document.key, nothing, None if document.counted is None else nothing, last=True)
