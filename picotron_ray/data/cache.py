"""Token cache: a source is tokenised once per node, then memory-mapped by every worker.

``<cache>/tokens-<key>/{train,held_out}.u16`` and ``meta.json``; the key is a hash of the source's settings
and of its files' names, sizes and modification times, so a changed file makes a new cache. It is built
beside its place under a file lock (workers of a node start together) and renamed at the end, so a reader
sees all of it or nothing. Opening checks sizes, and the content's digest while that costs milliseconds; a
cache that fails is built again. Ids: a byte is its own id, 256 ends a document.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np
import xxhash

from picotron_ray.config.schema.data import END_OF_DOCUMENT, DataConfig
from picotron_ray.data.bigram_baseline import bigram_entropy
from picotron_ray.data.samples import Tokens
from picotron_ray.data.sources import Document, SourceFile, find_files, read_documents, unreadable
from picotron_ray.errors import DataError

VOCABULARY = END_OF_DOCUMENT + 1
VERSION = 1
CHECKED_BYTES = 256 << 20  # at most this much is hashed at every opening: some 10 ms
_SPLITS = ("train", "held_out")
_TOKEN = np.dtype("<u2")


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
    files = find_files(data)
    place = folder / f"tokens-{_cache_key(data, files)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_suffix(".lock")):
            opened = _open(place)
            if opened is None:
                _build(data, files, place)
                opened = _open(place)
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(
            f"token cache: cannot write {place}: {why}; free space or allow writing there"
        ) from None
    if opened is None:
        raise DataError(f"token cache: {place} does not read back as written; check that disk")
    return opened


def _cache_key(data: DataConfig, files: list[SourceFile]) -> str:
    """Identity of what would be tokenised: settings, and each file's name, size and modification time."""
    settings = [VERSION, data.source, data.text_key, data.held_out_fraction]
    hasher = xxhash.xxh3_128(json.dumps(settings).encode())
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise unreadable(file.path, error) from None
        entry = f"{file.path.absolute()}\0{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        hasher.update(entry.encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Hold a lock among processes; the kernel releases it when the holder dies."""
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield stream


def _open(place: Path) -> TokenSplits | None:
    """Open the cache at ``place``; None where there is none or it is damaged."""
    try:
        meta = json.loads((place / "meta.json").read_text("utf-8"))
        splits = [_map(place / f"{name}.u16", int(meta["tokens"][name])) for name in _SPLITS]
        digest, entropy = str(meta["digest"]), float(meta["bigram_entropy"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if any(part is None for part in splits):
        return None
    train, held = (part for part in splits if part is not None)
    if train.nbytes + held.nbytes <= CHECKED_BYTES and _digest(train, held) != digest:
        return None
    return TokenSplits(train, held, digest, entropy)


def _map(path: Path, tokens: int) -> Tokens | None:
    if path.stat().st_size != tokens * _TOKEN.itemsize:
        return None
    return np.memmap(path, _TOKEN, "r") if tokens else np.empty(0, _TOKEN)


def _digest(train: Tokens, held: Tokens) -> str:
    """xxh3_128 of both streams and their lengths."""
    hasher = xxhash.xxh3_128(f"{len(train)},{len(held)};".encode())
    hasher.update(train.data)
    hasher.update(held.data)
    return hasher.hexdigest()


def _build(data: DataConfig, files: list[SourceFile], place: Path) -> None:
    """Tokenise into a folder of its own, then rename it into place; the caller holds the lock."""
    fresh = place.with_suffix(".new")
    for stale in (fresh, place):  # of a builder that was killed, or damaged
        if stale.exists():
            shutil.rmtree(stale)
    fresh.mkdir()
    try:
        _write(data, files, fresh)
        train, held = (_mapped_file(fresh / f"{name}.u16") for name in _SPLITS)
        meta = {
            "version": VERSION,
            "tokens": {"train": len(train), "held_out": len(held)},
            "digest": _digest(train, held),
            "bigram_entropy": bigram_entropy(held),
        }
        (fresh / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
        fresh.rename(place)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _mapped_file(path: Path) -> Tokens:
    tokens = _map(path, path.stat().st_size // _TOKEN.itemsize)
    assert tokens is not None
    return tokens


def _write(data: DataConfig, files: list[SourceFile], folder: Path) -> None:
    """Write both streams: by the hash of each document's key, or by position where one would be empty."""
    paths = [folder / f"{name}.u16" for name in _SPLITS]
    with paths[0].open("wb") as train, paths[1].open("wb") as held:
        for document in read_documents(data, files):
            _append(held if held_out(document.key, data.held_out_fraction) else train, document)
    if all(path.stat().st_size for path in paths):
        return
    # One document, or a handful of them on one side: the last share of the stream is held out instead.
    full = max(paths, key=lambda path: path.stat().st_size)
    tokens = full.stat().st_size // _TOKEN.itemsize
    if not tokens:
        where = data.path if data.source != "stdlib" else "the standard library"
        raise DataError(f"data.path: {where} holds no text; every file of it is empty")
    tail = tail_tokens(tokens, data.held_out_fraction)
    if full != paths[0]:
        os.replace(full, paths[0])
    with paths[0].open("r+b") as train, paths[1].open("wb") as held:
        train.seek((tokens - tail) * _TOKEN.itemsize)
        shutil.copyfileobj(train, held)
        train.truncate((tokens - tail) * _TOKEN.itemsize)


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
