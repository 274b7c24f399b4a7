"""Text sources: documents are named and read, one after the other.

A document is a file (stdlib, text) or a row (jsonl, parquet, arrow, hf). Its *split key* decides whether it
is held out: the file's name relative to the folder that was asked for, so that a copy elsewhere splits the
same way; for a row, which has no name, its text with its prompt, so that equal documents never stand on both
sides. Files are read in pieces, so a file may be larger than memory; a row may not.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.chat_template import ChatTemplate
from picotron_ray.data.jsonl_record import Span, not_utf8, record_of
from picotron_ray.data.rows import rows_of
from picotron_ray.data.source_files import InputFile, unreadable

PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """Document: its split key, and its bytes in pieces, to be read once.

    Fields:
        counted: ranges of its bytes that count in the loss, ascending; None: all do.
    """

    key: bytes
    pieces: Iterator[bytes]
    counted: tuple[Span, ...] | None = None


def read_documents(
    data: DataConfig, files: Sequence[InputFile], chat: ChatTemplate | None = None
) -> Iterator[Document]:
    """Read all documents, in the files' order; each must be consumed before the next is asked for.

    Args:
        chat: template of rows that are chats; None: they are not.

    Raises DataError for a file that cannot be read, is not UTF-8 (text, jsonl), or has rows that are not what
    was asked for (`jsonl_record`, `rows`).
    """
    for file in files:
        if data.source in ("stdlib", "text"):
            key = file.name.encode("utf-8", "surrogateescape")
            yield Document(key, _pieces(file, data.source == "text"))
            continue
        for row, place in rows_of(file, data):
            record = record_of(row, place, data, chat)
            yield Document(record.text, iter((record.text,)), record.counted)


def _pieces(file: InputFile, check: bool) -> Iterator[bytes]:
    """Read a file's bytes; with ``check`` they must be UTF-8 (nothing is re-encoded)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        with file.open() as stream:
            while piece := stream.read(PIECE_BYTES):
                if check:
                    decoder.decode(piece)
                done += len(piece)
                yield piece
            if check:
                decoder.decode(b"", final=True)
    except OSError as error:
        raise unreadable(file.where, error) from None
    except UnicodeDecodeError as error:
        # the decoder counts from the bytes that it carried over from the last piece
        raise not_utf8(file.where, f"near byte {done + error.start}") from None
