"""Words between the coordinator and the assembler's process: JSON with any number of bytes beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from picotron_ray import errors
from picotron_ray.checkpoint.store.assembly import Stored
from picotron_ray.checkpoint.store.manifest import Segment, segment_row
from picotron_ray.checkpoint.store.outline import Outline
from picotron_ray.errors import CorruptError, PicotronError

_LENGTH = 8  # bytes before a frame's head


def encode_frame(words: dict[str, Any], blobs: Sequence[bytes] = ()) -> list[bytes]:
    """Encode as pieces to be written one after the other: no blob is copied."""
    head = json.dumps({**words, "blobs": [len(blob) for blob in blobs]}).encode()
    return [len(head).to_bytes(_LENGTH, "big"), head, *blobs]


def decode_frames(unread: bytearray) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """Take whole frames off the front of what was read."""
    while len(unread) >= _LENGTH:
        at = _LENGTH + int.from_bytes(unread[:_LENGTH], "big")
        if len(unread) < at:
            return
        words = json.loads(unread[_LENGTH:at])
        lengths = words.pop("blobs")
        if len(unread) < at + sum(lengths):
            return
        blobs = []
        for length in lengths:
            blobs.append(bytes(unread[at : at + length]))
            at += length
        del unread[:at]
        yield words, blobs


def outline_words(outline: Outline) -> tuple[dict[str, Any], list[bytes]]:
    """Words for an outline; ``outline_from`` reads them."""
    words = {"identity": [outline.step, outline.term, outline.n], "stored_bytes": outline.stored_bytes}
    return {**words, "ledger": [segment_row(one) for one in outline.ledger]}, [outline.addresses]


def outline_from(words: dict[str, Any], blobs: Sequence[bytes]) -> Outline:
    ledger = tuple(Segment(*row) for row in words["ledger"])
    step, term, n = words["identity"]
    return Outline(step, term, n, ledger, blobs[0], words["stored_bytes"])


def stored_words(stored: Stored) -> dict[str, Any]:
    """Words for a stored manifest; ``stored_from`` reads them."""
    return {**asdict(stored), "segments": [segment_row(one) for one in stored.segments]}


def stored_from(words: dict[str, Any]) -> Stored:
    segments = tuple(Segment(*row) for row in words["segments"])
    return Stored(**{**words, "segments": segments, "intents": tuple(words["intents"])})


def error_words(error: Exception) -> dict[str, Any]:
    """Words for an error; ``raise_told`` raises it."""
    return {"error": type(error).__name__, "text": str(error), "where": getattr(error, "where", "")}


def raise_told(words: dict[str, Any]) -> None:
    """Raise the error that words speak of, as its own class where it is one of ours."""
    if "error" not in words:
        return
    kind = getattr(errors, words["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, PicotronError)):
        raise RuntimeError(f"the assembler met {words['error']}: {words['text']}")
    raise CorruptError(words["text"], words["where"]) if kind is CorruptError else kind(words["text"])
