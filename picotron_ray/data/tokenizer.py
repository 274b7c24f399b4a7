"""Tokenizers: text to ids and back.

Without ``data.tokenizer`` a byte is its own id, and 256 ends a document. With it ids are those of a
``tokenizer.json``, read by the library `tokenizers` from a file; nothing is fetched. Ids of memmap files
without ``data.tokenizer`` mean nothing to anybody here, and are shown as numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from picotron_ray.config.schema.data import END_OF_DOCUMENT, DataConfig
from picotron_ray.data.source_files import shown
from picotron_ray.errors import DataError, install_extra

Ids = npt.NDArray[np.int64]
FILE = "tokenizer.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a tokenizer that belong to it, where they are there."""
MOST_BYTES = 256 << 20
END_SHOWN = "<|end of document|>"


class Tokenizer(Protocol):
    """Tokenizer of a run's data."""

    @property
    def vocabulary(self) -> int:
        """Ids are below it; 0 where nobody knows."""

    @property
    def end_id(self) -> int | None:
        """Id that ends a document; None where nothing says."""

    @property
    def digest(self) -> str:
        """Digest of what decides ids: blake3 of the file, in hex; a word where there is none."""

    def id_of(self, token: str) -> int | None:
        """Return the id of one token by its text; None where there is no such token."""

    def encode(self, texts: Sequence[str], special: bool = False) -> list[Ids]:
        """Return the ids of each text, without its end.

        Args:
            special: whether special tokens written out in a text are these tokens, as in a rendered chat.
                Else they are text like any other, as in documents.
        """

    def encode_with_offsets(self, texts: Sequence[str], special: bool = False) -> list[tuple[Ids, Ids]]:
        """Return the ids of each text, and the range of its UTF-8 bytes of each, ``[ids, 2]``."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, for people: special tokens included, bytes of no character as U+FFFD."""


def open_tokenizer(data: DataConfig) -> Tokenizer:
    """Open the tokenizer of a run's data.

    Raises DataError for a file that is missing or none, an end that it does not have, or a missing package.
    """
    if data.tokenizer is not None:
        ends = {source.end_token for source in data.named_sources.values()} - {None}
        return _from_file(data.tokenizer, ends.pop() if len(ends) == 1 else None)
    kinds = {source.source for source in data.named_sources.values()}
    return NumberTokenizer(data.end_token) if "memmap" in kinds else ByteTokenizer()


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Tokenizer whose ids are bytes."""

    vocabulary: int = END_OF_DOCUMENT + 1
    end_id: int = END_OF_DOCUMENT
    digest: str = "bytes"

    def id_of(self, token: str) -> int | None:
        """Return the byte of an ASCII character."""
        return ord(token) if len(token) == 1 and token.isascii() else None

    def encode(self, texts: Sequence[str], special: bool = False) -> list[Ids]:
        """Return the UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str], special: bool = False) -> list[tuple[Ids, Ids]]:
        """Return the bytes of each text, and their places."""
        ranges = (np.arange(len(ids)) for ids in self.encode(texts))
        return [(ids, np.stack([at, at + 1], 1)) for ids, at in zip(self.encode(texts), ranges, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes, and a word for each end of a document."""
        parts, held = [], bytearray()
        for token in ids:
            if token < END_OF_DOCUMENT:
                held.append(token)
                continue
            parts.append(held.decode("utf-8", "replace"))
            parts.append(END_SHOWN if token == END_OF_DOCUMENT else f"<|{token}|>")
            held.clear()
        return "".join([*parts, held.decode("utf-8", "replace")])


@dataclass(frozen=True, slots=True)
class NumberTokenizer:
    """Stand-in where a run has ids alone."""

    end_id: int | None = None
    vocabulary: int = 0
    digest: str = "numbers"

    def id_of(self, token: str) -> int | None:
        """Return None: no token has a text."""

    def encode(self, texts: Sequence[str], special: bool = False) -> list[Ids]:
        """Raise DataError."""
        raise DataError(
            "data.tokenizer: saw null with data.source=memmap, whose ids come from elsewhere; name the"
            " tokenizer.json that made them"
        )

    def encode_with_offsets(self, texts: Sequence[str], special: bool = False) -> list[tuple[Ids, Ids]]:
        """Raise DataError."""
        return [(ids, np.zeros((0, 2), np.int64)) for ids in self.encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the numbers, with spaces between."""
        return " ".join(str(int(token)) for token in ids)


class FileTokenizer:
    """Tokenizer of a ``tokenizer.json``.

    Args:
        files: bytes by name, of that file and those of `BESIDE`.
        where: the file's path, for messages.
        end_token: id that ends a document; None: the eos_token that a file says.
    """

    def __init__(self, files: dict[str, bytes], where: str, end_token: int | None = None) -> None:
        self.files, self.where = files, where
        self.digest = blake3(files[FILE]).hexdigest()
        self._tokenizer: Any = _parsed(files[FILE], where)
        self.words: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self.words:
            raise DataError(f"data.tokenizer: {where} has no tokens; give another one")
        self.vocabulary = max(self.words.values()) + 1
        self.end_id = self._end(end_token)

    def id_of(self, token: str) -> int | None:
        """Return the id of one token by its text; None where there is no such token."""
        return self.words.get(token)

    def encode(self, texts: Sequence[str], special: bool = False) -> list[Ids]:
        """Return the ids of each text, on several cores."""
        self._tokenizer.encode_special_tokens = not special
        found = self._tokenizer.encode_batch_fast(list(map(_whole, texts)), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in found]

    def encode_with_offsets(self, texts: Sequence[str], special: bool = False) -> list[tuple[Ids, Ids]]:
        """Return the ids of each text, and the ranges of its UTF-8 bytes that they stand for."""
        whole = list(map(_whole, texts))
        self._tokenizer.encode_special_tokens = not special
        found = self._tokenizer.encode_batch(whole, add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.int64), _in_bytes(text, encoding.offsets))
            for text, encoding in zip(whole, found, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included; ids that no token has as numbers."""
        parts: list[str] = []
        held: list[int] = []
        for token in map(int, ids):
            if token < self.vocabulary:
                held.append(token)
                continue
            parts += [self._text(held), f"<|{token}|>"]
            held = []
        return "".join([*parts, self._text(held)])

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def named(self, key: str) -> str | None:
        """Return the text of a special token by the key that transformers has for it, such as bos_token."""
        for name in BESIDE[:2]:
            if name in self.files:
                found = _object(self.files[name], f"{os.path.dirname(self.where)}/{name}").get(key)
                found = found.get("content") if isinstance(found, dict) else found
                if isinstance(found, str):
                    return found
        return None

    def settings(self) -> dict[str, Any]:
        """Return what tokenizer_config.json holds; nothing where it is not there."""
        data = self.files.get(BESIDE[0])
        return {} if data is None else _object(data, f"{os.path.dirname(self.where)}/{BESIDE[0]}")

    def _end(self, given: int | None) -> int | None:
        if given is not None:
            if given >= self.vocabulary:
                raise DataError(
                    f"data.end_token: saw {given}, expected an id below {self.vocabulary}, the tokens of"
                    f" {self.where}"
                )
            return given
        name = self.named("eos_token")
        if name is None:
            return None
        if name not in self.words:
            raise DataError(
                f"data.tokenizer: the eos_token {name!r} of tokenizer_config.json is no token of"
                f" {self.where}; say data.end_token"
            )
        return self.words[name]


def _from_file(given: str, end_token: int | None) -> FileTokenizer:
    path = Path(os.path.expanduser(given))
    path = path / FILE if path.is_dir() else path
    files = {FILE: _bytes(path)}
    for name in BESIDE:
        if (path.parent / name).is_file():
            files[name] = _bytes(path.parent / name)
    return FileTokenizer(files, shown(path), end_token)


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise DataError(f"data.tokenizer: {shown(path)} has {size} bytes, expected at most {MOST_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(
            f"data.tokenizer: cannot read {shown(path)}: {why}; give a tokenizer.json, or a folder with one"
        ) from None


def _parsed(data: bytes, where: str) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ModuleNotFoundError:
        text = f"saw {where}, but the package tokenizers is not there; on every node {install_extra('text')}"
        raise DataError(f"data.tokenizer: {text}") from None
    try:
        found = Library.from_str(data.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        why = " ".join(str(error).split())[:120]
        raise DataError(
            f"data.tokenizer: {where} is no tokenizer.json that the package tokenizers reads ({why}); save it"
            " anew with transformers' save_pretrained"
        ) from None
    found.no_truncation()
    found.no_padding()
    return found


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise DataError(f"data.tokenizer: {where} is not JSON ({error}); fetch it again") from None
    if not isinstance(found, dict):
        raise DataError(f"data.tokenizer: {where} holds no object of JSON; fetch it again")
    return found


def _in_bytes(text: str, offsets: list[tuple[int, int]]) -> Ids:
    """Ranges of characters as ranges of UTF-8 bytes."""
    found = np.array(offsets, np.int64).reshape(-1, 2)
    if text.isascii():
        return found
    places = np.cumsum([0, *(len(character.encode()) for character in text)])
    return np.asarray(places[found], np.int64)


def _whole(text: str) -> str:
    """Replace halves of surrogate pairs, which no UTF-8 has."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
