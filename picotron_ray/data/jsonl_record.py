"""One row of a source (a line of JSON, a row of a table): its text, and which of its bytes count in the loss.

Without masks the text is a string under ``data.text_key``. With ``data.loss_mask`` one of two keys says what
counts:

- ``data.prompt_key``: a string that comes before the text and does not count; all of the text does, and so
  does the document's end, with which a model learns to stop.
- ``data.spans_key``: a list of ``[start, end]`` in characters (code points) of the text, from 0 and without
  the end, as Python slices. They ascend and do not overlap. The document's end counts where the last one
  reaches the text's end.

A chat (``data.chat_template``) is the text of its messages; with ``data.loss_mask`` its answers count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.chat_template import ChatTemplate
from picotron_ray.errors import DataError

Span = tuple[int, int]
"""Half-open range."""


@dataclass(frozen=True, slots=True)
class Record:
    """UTF-8 bytes of a document, and the ranges of them that count; None: all do."""

    text: bytes
    counted: tuple[Span, ...] | None = None


def not_utf8(place: str, where: str) -> DataError:
    """Make the error for bytes that are no UTF-8; ``place`` is a path or a line, as people see it."""
    return DataError(
        f"data.path: {place} is not UTF-8 ({where}); re-encode it, or choose the text files by a glob"
    )


def record_of(record: Any, place: str, data: DataConfig, chat: ChatTemplate | None = None) -> Record:
    """Read one row.

    Args:
        record: mapping of keys to values, as whoever wrote the file says.
        place: names the row in messages.
        chat: template of rows that are chats.

    Raises:
        DataError: it is no mapping, a key that is asked for is missing or holds something else, or nothing of
            it counts.
    """
    if chat is not None:
        return _chat(record, place, data, chat)
    text = _string(record, data.text_key, "data.text_key", place)
    if not data.loss_mask:
        return Record(_utf8(text))
    if data.prompt_key is not None:
        prompt = _string(record, data.prompt_key, "data.prompt_key", place)
        if not text:
            raise DataError(
                f"data.text_key: {place} has an empty string under {data.text_key!r}, so that nothing of it"
                " counts in the loss; drop the line"
            )
        before, after = _utf8(prompt), _utf8(text)
        return Record(before + after, ((len(before), len(before) + len(after)),))
    assert data.spans_key is not None
    spans = _spans(record, text, data.spans_key, place)
    return Record(_utf8(text), tuple(_in_bytes(text, spans)))


def _chat(record: Any, place: str, data: DataConfig, chat: ChatTemplate) -> Record:
    messages = record.get(data.messages_key) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"data.messages_key: {place} has no list of messages under {data.messages_key!r} (seen:"
            f" {_seen(record)}); name the right key"
        )
    text, spans = chat.render(messages, record.get("tools"), place)
    if not data.loss_mask:
        return Record(_utf8(text))
    if not spans:
        raise DataError(
            f"data.messages_key: {place} has no answer of an assistant, so that nothing of it counts in the"
            " loss; drop the row"
        )
    return Record(_utf8(text), tuple(_in_bytes(text, spans)))


def parse_line(line: bytes, place: str) -> Any:
    """Parse a line of JSON. Raises DataError."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise not_utf8(place, "in this line") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"data.path: {place} is not JSON ({error}); expected one JSON object per line"
        ) from None


def _utf8(text: str) -> bytes:
    # JSON may escape half of a surrogate pair; such a character has no UTF-8 form
    return text.encode("utf-8", "replace")


def _seen(record: Any) -> str:
    return f"keys {', '.join(sorted(record)[:8])}" if isinstance(record, dict) else type(record).__name__


def _string(record: Any, key: str, config_key: str, place: str) -> str:
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f"{config_key}: {place} has no string under {key!r} (seen: {_seen(record)}); name the right key"
        )
    return text


def _spans(record: dict[str, Any], text: str, key: str, place: str) -> Sequence[Span]:
    found = record.get(key)
    if not isinstance(found, list):
        raise DataError(
            f"data.spans_key: {place} has no list under {key!r} (seen: {_seen(record)}); name the right key"
        )
    if not found:
        raise DataError(
            f"data.spans_key: {place} has an empty list under {key!r}, so that nothing of it counts in the"
            " loss; drop the line"
        )
    last = 0
    for span in found:
        if not _is_span(span) or not last <= span[0] < span[1] <= len(text):
            raise DataError(
                f"data.spans_key: {place} has {json.dumps(span)[:60]} under {key!r}, expected [start, end]"
                f" with {last} <= start < end <= {len(text)}, in characters of the text, in ascending order"
            )
        last = span[1]
    return [(start, end) for start, end in found]


def _is_span(span: Any) -> TypeGuard[list[int]]:
    return isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)


def _in_bytes(text: str, spans: Iterable[Span]) -> Iterable[Span]:
    """Ranges of characters as ranges of UTF-8 bytes; each character is looked at once."""
    characters = bytes_ = 0
    for start, end in spans:
        first = bytes_ + len(_utf8(text[characters:start]))
        last = first + len(_utf8(text[start:end]))
        yield first, last
        characters, bytes_ = end, last
