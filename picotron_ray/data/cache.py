"""Token cache: a source is tokenised once per node, then memory-mapped by every worker.

``<cache>/tokens-<key>/{train,held_out}.u16`` and ``meta.json``; of jsonl with ``data.loss_mask`` also
``{train,held_out}.mask``, a byte per token. The key is a hash of the source's settings and of its files'
names, sizes and modification times, so a changed file makes a new cache. It is built beside its place
under a file lock (workers of a node start together) and renamed at the end, so a reader sees all of it or
nothing. Opening checks sizes, and the content's digest while that costs milliseconds; a cache that fails
is built again. Ids: a byte is its own id, 256 ends a document.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from picotron_ray.config.schema.data import END_OF_DOCUMENT, DataConfig
from picotron_ray.data.bigram_baseline import bigram_entropy
from picotron_ray.data.cache_folder import open_or_make
from picotron_ray.data.samples import Tokens
from picotron_ray.data.sources import Document, SourceFile, find_files, read_documents, unreadable
from picotron_ray.errors import DataError

VOCABULARY = END_OF_DOCUMENT + 1
VERSION = 1
CHECKED_BYTES = 256 << 20  # at most this much is hashed at every opening: some 10 ms
_SPLITS = ("train", "held_out")
_TOKEN = np.dtype("<u2")
_MASK = np.dtype("u1")


@dataclass(frozen=True, slots=True)
class TokenSplits:
    """Both splits of a source as token streams, the digest of their content, and the bigram baseline.

    Fields:
        masks: of both streams, one byte per token (`Dataset`); None: there are none.
    """

    train: Tokens
    held_out: Tokens
    digest: str
    bigram_entropy: float
    masks: tuple[Tokens, Tokens] | None = None


def held_out(key: bytes, fraction: float) -> bool:
    """Whether a document belongs to the held-out part: its key's hash falls into that share of all hashes."""
    return xxhash.xxh3_64_intdigest(key) < fraction * 2.0**64


def byte_splits(data: DataConfig, folder: Path) -> TokenSplits:
    """Open the byte tokens of a stdlib, text or jsonl source in the cache ``folder``, or build them there.

    Raises DataError for input that cannot be read or a cache folder that cannot be written.
    """
    files, masked = find_files(data), _masked(data)
    place = folder / f"tokens-{_cache_key(data, files)}"
    return open_or_make(
        place,
        "token cache",
        lambda made: _open(made, masked),
        lambda fresh: _build(data, files, fresh),
    )


def _cache_key(data: DataConfig, files: list[SourceFile]) -> str:
    """Identity of what would be tokenised: settings, and each file's name, size and modification time."""
    settings: list[object] = [VERSION, data.source, data.text_key, data.held_out_fraction]
    if data.loss_mask:
        settings += [data.prompt_key, data.spans_key]
    hasher = xxhash.xxh3_128(json.dumps(settings).encode())
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise unreadable(file.path, error) from None
        entry = f"{file.path.absolute()}\0{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        hasher.update(entry.encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()


def _masked(data: DataConfig) -> bool:
    return data.source == "jsonl" and data.loss_mask


def _open(place: Path, masked: bool) -> TokenSplits | None:
    """Open the cache at ``place``; None where there is none or it is damaged."""
    try:
        meta = json.loads((place / "meta.json").read_text("utf-8"))
        counts = [int(meta["tokens"][name]) for name in _SPLITS]
        parts = [_map(place / f"{name}.u16", _TOKEN, n) for name, n in zip(_SPLITS, counts, strict=True)]
        if masked:
            parts += [_map(place / f"{name}.mask", _MASK, n) for name, n in zip(_SPLITS, counts, strict=True)]
        digest, entropy = str(meta["digest"]), float(meta["bigram_entropy"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if sum(part.nbytes for part in found) <= CHECKED_BYTES and _digest(found) != digest:
        return None
    return TokenSplits(found[0], found[1], digest, entropy, (found[2], found[3]) if masked else None)


def _map(path: Path, kind: np.dtype[Any], items: int) -> Tokens | None:
    if path.stat().st_size != items * kind.itemsize:
        return None
    return np.memmap(path, kind, "r") if items else np.empty(0, kind)


def _digest(streams: Sequence[Tokens]) -> str:
    """xxh3_128 of all streams and of both splits' lengths."""
    hasher = xxhash.xxh3_128(f"{len(streams[0])},{len(streams[1])};".encode())
    for stream in streams:
        hasher.update(stream.data)
    return hasher.hexdigest()


def _build(data: DataConfig, files: list[SourceFile], folder: Path) -> None:
    """Tokenise into an empty folder."""
    _write(data, files, folder)
    streams = [_mapped_file(path, kind) for path, kind in _files(folder, _masked(data))]
    train, held = streams[:2]
    meta = {
        "version": VERSION,
        "tokens": {"train": len(train), "held_out": len(held)},
        "digest": _digest(streams),
        "bigram_entropy": bigram_entropy(held),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")


def _mapped_file(path: Path, kind: np.dtype[Any]) -> Tokens:
    tokens = _map(path, kind, path.stat().st_size // kind.itemsize)
    assert tokens is not None
    return tokens


def _files(folder: Path, masked: bool) -> list[tuple[Path, np.dtype[Any]]]:
    """Files of a cache and the types of their items: tokens of both splits, then masks."""
    kinds: dict[str, np.dtype[Any]] = {"u16": _TOKEN, "mask": _MASK} if masked else {"u16": _TOKEN}
    return [(folder / f"{name}.{suffix}", kind) for suffix, kind in kinds.items() for name in _SPLITS]


def _write(data: DataConfig, files: list[SourceFile], folder: Path) -> None:
    """Write both streams: by the hash of each document's key, or by position where one would be empty."""
    places = _files(folder, _masked(data))
    with ExitStack() as opened:
        streams = [opened.enter_context(path.open("wb")) for path, _ in places]
        for document in read_documents(data, files):
            tokens, *mask = streams[held_out(document.key, data.held_out_fraction) :: 2]
            _append(tokens, document)
            if mask:
                _append_mask(mask[0], document)
    paths = [path for path, _ in places[:2]]
    if all(path.stat().st_size for path in paths):
        return
    # One document, or a handful of them on one side: the last share of the stream is held out instead.
    full = max(paths, key=lambda path: path.stat().st_size)
    size = full.stat().st_size // _TOKEN.itemsize
    if not size:
        where = data.path if data.source != "stdlib" else "the standard library"
        raise DataError(f"data.path: {where} holds no text; every file of it is empty")
    tail = tail_tokens(size, data.held_out_fraction)
    for (train, kind), (held, _) in zip(places[::2], places[1::2], strict=True):
        if full != paths[0]:
            os.replace(held, train)
        _move_tail(train, held, (size - tail) * kind.itemsize)


def _move_tail(train: Path, held: Path, at: int) -> None:
    with train.open("r+b") as source, held.open("wb") as target:
        source.seek(at)
        shutil.copyfileobj(source, target)
        source.truncate(at)


def tail_tokens(tokens: int, fraction: float) -> int:
    """Count the tokens at the end of a stream that are held out where documents cannot decide it."""
    return round(tokens * fraction)


def _append(stream: BinaryIO, document: Document) -> None:
    """Append bytes as ids of two bytes; a document of no bytes leaves no trace."""
    wrote = False
    for piece in document.pieces:
        if piece:
            stream.write(np.frombuffer(piece, np.uint8).astype(_TOKEN).data)
            wrote = True
    if wrote:
        stream.write(np.array([END_OF_DOCUMENT], _TOKEN).data)


def _append_mask(stream: BinaryIO, document: Document) -> None:
    """Append 1 for each token that counts: those of its ranges, and the end where the last one reaches it."""
    assert document.counted is not None
    mask = np.zeros(len(document.key) + 1, _MASK)  # the key of a record is its text
    for start, end in document.counted:
        mask[start:end] = 1
    mask[-1] = mask[-2]
    stream.write(mask.data)
