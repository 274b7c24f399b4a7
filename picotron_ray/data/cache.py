"""Token cache: a source is tokenised once per node, then memory-mapped by every worker.

``<cache>/tokens-<key>/`` holds the files of `split_writer` and ``meta.json``. The key is a hash of the
source's settings, of the tokenizer's and template's digests, and of its files' names, sizes and marks
(modification times or etags), so a changed file makes a new cache. It is built beside its place under a file
lock (workers of a node start together) and renamed at the end, so a reader sees all of it or nothing. Opening
checks sizes, and the content's digest while that costs milliseconds; a cache that fails is built again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.bigram_baseline import bigram_entropy
from picotron_ray.data.cache_folder import open_or_make
from picotron_ray.data.chat_template import ChatTemplate, open_chat
from picotron_ray.data.listing import check_unchanged, find_files
from picotron_ray.data.samples import Tokens
from picotron_ray.data.source_files import InputFile
from picotron_ray.data.sources import read_documents
from picotron_ray.data.split_writer import SPLITS, CacheForm, write_splits
from picotron_ray.data.tokenise import Encoder
from picotron_ray.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from picotron_ray.errors import DataError

VERSION = 1
CHECKED_BYTES = 256 << 20  # at most this much is hashed at every opening: some 10 ms


@dataclass(frozen=True, slots=True)
class TokenSplits:
    """Both splits of a source as token streams, the digest of their content, and the bigram baseline.

    Fields:
        masks: of both streams, one byte per token (`Dataset`); None: there are none.
        ends: of both streams, where each document ends (exclusive); None: an id tells.
    """

    train: Tokens
    held_out: Tokens
    digest: str
    bigram_entropy: float
    masks: tuple[Tokens, Tokens] | None = None
    ends: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class TextSource:
    """Source of text, and what makes tokens of it."""

    data: DataConfig
    tokenizer: Tokenizer
    chat: ChatTemplate | None

    @staticmethod
    def of(data: DataConfig) -> TextSource:
        """Open tokenizer and template. Raises DataError, also where nothing says what ends a document."""
        tokenizer = open_tokenizer(data)
        if tokenizer.end_id is None:
            raise DataError(
                f"data.end_token: saw null, and no tokenizer_config.json with an eos_token lies beside"
                f" {data.tokenizer}; say which id ends a document"
            )
        Encoder(data, tokenizer)  # its tokens are there
        return TextSource(data, tokenizer, open_chat(data, tokenizer))

    @property
    def end(self) -> int:
        """Id that ends a document."""
        assert self.tokenizer.end_id is not None
        return self.tokenizer.end_id

    @property
    def form(self) -> CacheForm:
        """Form of its cache."""
        data = self.data
        masked = data.loss_mask and data.source not in ("stdlib", "text")
        plain = isinstance(self.tokenizer, ByteTokenizer)
        return CacheForm(self.tokenizer.vocabulary, masked, not plain, self.end)

    def settings(self) -> list[object]:
        """Return all that decides tokens, but for the files."""
        data, plain = self.data, isinstance(self.tokenizer, ByteTokenizer)
        settings: list[object] = [VERSION, data.source, data.text_key, data.held_out_fraction]
        if data.loss_mask:
            settings += [data.prompt_key, data.spans_key]
        if not plain or self.chat:
            settings += ["tokenizer", self.tokenizer.digest, self.end]
            settings += [self.chat.digest, data.messages_key] if self.chat else [None]
            asked = data.fill_in_the_middle
            settings += [None if asked is None else asked.model_dump(mode="json")]
        return settings + ([data.split] if data.source == "hf" else [])


def byte_splits(data: DataConfig, folder: Path) -> TokenSplits:
    """Open the tokens of a source of text in the cache ``folder``, or build them there (`text_splits`)."""
    return text_splits(TextSource.of(data), folder)


def text_splits(source: TextSource, folder: Path) -> TokenSplits:
    """Open the tokens of a source of text in the cache ``folder``, or build them there.

    Raises DataError for input that cannot be read, or changes meanwhile, or a cache folder that cannot be
    written.
    """
    files = find_files(source.data)
    place = folder / f"tokens-{cache_key(source, files)}"
    return open_or_make(
        place,
        "token cache",
        lambda made: _open(made, source.form),
        lambda fresh: _build(source, files, fresh),
    )


def cache_key(source: TextSource, files: Sequence[InputFile]) -> str:
    """Return the identity of what would be tokenised: settings, and each file's name, size and mark."""
    hasher = xxhash.xxh3_128(json.dumps(source.settings()).encode())
    for file in files:
        hasher.update(file.identity().encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()


def _open(place: Path, form: CacheForm) -> TokenSplits | None:
    """Open the cache at ``place``; None where there is none or it is damaged."""
    try:
        meta = json.loads((place / "meta.json").read_text("utf-8"))
        parts = {}
        for suffix, kind in form.kinds.items():
            counts = meta["documents" if suffix == "ends" else "tokens"]
            parts[suffix] = [_map(place / f"{name}.{suffix}", kind, int(counts[name])) for name in SPLITS]
        digest, entropy = str(meta["digest"]), float(meta["bigram_entropy"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    found = [part for pair in parts.values() for part in pair if part is not None]
    if len(found) < 2 * len(parts):
        return None
    if sum(part.nbytes for part in found) <= CHECKED_BYTES and _digest(found) != digest:
        return None
    masks = (found[2], found[3]) if form.masked else None
    ends = (found[-2], found[-1]) if form.ended else None
    return TokenSplits(found[0], found[1], digest, entropy, masks, ends)


def _map(path: Path, kind: np.dtype[Any], items: int) -> Any:
    if path.stat().st_size != items * kind.itemsize:
        return None
    return np.memmap(path, kind, "r") if items else np.empty(0, kind)


def _digest(streams: Sequence[Any]) -> str:
    """xxh3_128 of all streams and of both splits' lengths."""
    hasher = xxhash.xxh3_128(f"{len(streams[0])},{len(streams[1])};".encode())
    for stream in streams:
        hasher.update(stream.data)
    return hasher.hexdigest()


def _build(source: TextSource, files: Sequence[InputFile], folder: Path) -> None:
    """Tokenise into an empty folder."""
    before = [file.identity() for file in files]
    _write(source, files, folder)
    if source.data.source not in ("stdlib", "hf"):
        check_unchanged(source.data, before)
    kinds = source.form.kinds
    paths = [(folder / f"{name}.{suffix}", kind) for suffix, kind in kinds.items() for name in SPLITS]
    streams = [_map(path, kind, path.stat().st_size // kind.itemsize) for path, kind in paths]
    train, held = streams[:2]
    meta: dict[str, object] = {
        "version": VERSION,
        "tokens": {"train": len(train), "held_out": len(held)},
        "digest": _digest(streams),
        "bigram_entropy": bigram_entropy(held),
    }
    if "ends" in kinds:
        meta["documents"] = {"train": len(streams[-2]), "held_out": len(streams[-1])}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")


def _write(source: TextSource, files: Sequence[InputFile], folder: Path) -> None:
    """Write all files but ``meta.json``."""
    data = source.data
    pieces = Encoder(data, source.tokenizer).pieces(read_documents(data, files, source.chat))
    if not write_splits(pieces, source.form, data.held_out_fraction, folder):
        where = data.path if data.source != "stdlib" else "the standard library"
        raise DataError(f"data.path: {where} holds no text; every file of it is empty")
