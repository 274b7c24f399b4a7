"""Samples of one source: both of its splits, opened and checked from the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from picotron_ray.config.schema.data import DataConfig, SourceConfig
from picotron_ray.data.batch import EVALUATION_SEED
from picotron_ray.data.cache import TextSource, TokenSplits, text_splits
from picotron_ray.data.memmap import SCAN_TOKENS, memmap_splits
from picotron_ray.data.plan.buckets import bucket_widths
from picotron_ray.data.plan.packed_cache import PackRequest, document_borders, packed_rows
from picotron_ray.data.plan.packed_samples import PackedSamples
from picotron_ray.data.plan.packing import Numbers
from picotron_ray.data.samples import Dataset, SampleSet, Tokens
from picotron_ray.errors import DataError

_Opened = TypeVar("_Opened")


@dataclass(frozen=True, slots=True)
class SourceSamples:
    """Both splits of a source.

    Fields:
        identity: what decides which samples there are.
        bigram_entropy: of the held-out tokens, nats per token.
        notes: what a user should know of how samples were made.
        end: id that ends a document; None where nothing says.
    """

    train: SampleSet
    held_out: SampleSet
    identity: str
    bigram_entropy: float
    notes: tuple[str, ...] = ()
    end: int | None = None


def open_source(key: str, data: DataConfig, model_vocab: int, seed: int, cache_dir: Path) -> SourceSamples:
    """Open a source of the data.

    Args:
        key: under which the config has it (`DataConfig.named_sources`).
        seed: of the order in which documents are packed.

    Raises DataError as `data.dataset.build_dataset` does.
    """
    return _named(key, data, lambda own: _open(own, model_vocab, seed, cache_dir))


def open_splits(
    key: str, data: DataConfig, model_vocab: int, cache_dir: Path
) -> tuple[TokenSplits, int | None]:
    """Open the token streams of a source; with the id that ends a document, None where nothing says.

    Raises DataError as `open_source` does, but for what samples need.
    """
    return _named(key, data, lambda own: _splits(own, model_vocab, cache_dir))


def alone(key: str, data: DataConfig) -> DataConfig:
    """Return the data of one source by itself."""
    source = data.named_sources[key]
    own = {name: getattr(source, name) for name in SourceConfig.model_fields}
    return data.model_copy(update={**own, "sources": ()})


def _named(key: str, data: DataConfig, opened: Callable[[DataConfig], _Opened]) -> _Opened:
    """Open a source, under whose key messages stand."""
    try:
        return opened(alone(key, data))
    except DataError as error:
        name, dot, rest = str(error).partition(".")
        if key == "data" or name != "data" or rest.partition(":")[0] not in SourceConfig.model_fields:
            raise
        raise DataError(f"{key}{dot}{rest}") from None


def training_borders(data: DataConfig, model_vocab: int, cache_dir: Path) -> Numbers:
    """Return the first token of each training document of one source, and the stream's end: int64.

    Raises DataError as `open_source` does.
    """
    splits, end = _splits(data, model_vocab, cache_dir)
    if splits.ends is not None:
        return np.append(np.zeros(1, np.int64), splits.ends[0])
    return document_borders(splits.train, end_of(data) if end is None else end)


def _open(data: DataConfig, model_vocab: int, seed: int, cache_dir: Path) -> SourceSamples:
    splits, end = _splits(data, model_vocab, cache_dir)
    train_mask, held_mask = splits.masks or (None, None)
    train_ends, held_ends = splits.ends or (None, None)
    parts = (
        ("training", splits.train, train_mask, train_ends),
        ("held-out", splits.held_out, held_mask, held_ends),
    )
    for name, tokens, mask, _ in parts:
        _check(data, name, tokens, mask)
    if data.batching == "fixed":
        apart = data.document_masks
        train, held = (
            Dataset(tokens, data.sequence_length, mask, ends if apart else None)
            for _, tokens, mask, ends in parts
        )
        return SourceSamples(train, held, splits.digest, splits.bigram_entropy, end=end)
    request = _request(data, splits.digest, seed, end_of(data) if end is None else end)
    held_request = replace(request, digest=f"{splits.digest} held out", seed=EVALUATION_SEED)
    packed, packed_held = (
        _packed(*part, asked, cache_dir) for part, asked in zip(parts, (request, held_request), strict=True)
    )
    identity = f"{splits.digest}/{request.way}"
    return SourceSamples(packed, packed_held, identity, splits.bigram_entropy, (packed.told(),), end)


def _request(data: DataConfig, digest: str, seed: int, end: int) -> PackRequest:
    """Say how documents share rows."""
    widths: tuple[int, ...] = ()
    if data.batching == "buckets":
        widths = data.buckets or bucket_widths(data.sequence_length + 1)
    most = None if data.max_batch_size is None else data.max_batch_size // data.global_batch
    return PackRequest(digest, end, data.sequence_length, seed, data.long_documents, widths, most)


def _splits(data: DataConfig, model_vocab: int, cache_dir: Path) -> tuple[TokenSplits, int | None]:
    """Open both splits; with the id that ends a document, None where nothing says."""
    if data.source == "memmap":
        return memmap_splits(data, model_vocab, cache_dir), data.end_token
    text = TextSource.of(data)
    vocabulary = text.tokenizer.vocabulary
    if model_vocab < vocabulary:
        whose = (
            f"ids of the byte tokenizer that data.source {data.source} uses (256 bytes, end of document)"
            if data.tokenizer is None
            else f"ids of data.tokenizer {data.tokenizer}"
        )
        raise DataError(
            f"model.vocab_size: {model_vocab} is less than the {vocabulary} {whose}; set it to at least"
            f" {vocabulary}"
        )
    splits = text_splits(text, cache_dir)
    if data.tokenizer is not None:
        splits = replace(splits, digest=f"{splits.digest}/{text.tokenizer.digest}")
    return splits, text.end


def _check(data: DataConfig, name: str, tokens: Tokens, mask: Tokens | None) -> None:
    """Raise DataError where a part has no sample, or none that counts."""
    if data.batching == "fixed" and len(tokens) <= data.sequence_length:
        raise DataError(
            f"data.path: the {name} part has {len(tokens)} tokens, but one sample needs"
            f" {data.sequence_length + 1}; give more data, a smaller data.sequence_length, or another"
            f" data.held_out_fraction than {data.held_out_fraction}"
        )
    if mask is not None and not _any_counts(mask):
        raise DataError(
            f"data.loss_mask: nothing of the {name} part counts in the loss; give more data, or another"
            f" data.held_out_fraction than {data.held_out_fraction}"
        )


def _packed(
    name: str, tokens: Tokens, mask: Tokens | None, ends: Any, request: PackRequest, cache_dir: Path
) -> PackedSamples:
    """Pack a part of the data into rows."""
    pieces, rows = packed_rows(tokens, request, cache_dir, ends, mask)
    found = PackedSamples(tokens, request.sequence_length, pieces, rows, request.end, mask)
    if mask is not None and not any(found.totals(np.array([row]))[1] for row in range(found.samples)):
        raise DataError(f"data.loss_mask: nothing of the {name} part counts in the loss of a packed row")
    return found


def end_of(data: DataConfig) -> int:
    """Return the token id that ends a document of token files. Raises DataError where nothing says."""
    if data.end_token is None:
        raise DataError("data.end_token: saw null, expected the id that ends a document in these token files")
    return data.end_token


def _any_counts(mask: Tokens) -> bool:
    """Whether some token counts, by looking as far as the first that does. Not at the first token of all."""
    return any(mask[at : at + SCAN_TOKENS].any() for at in range(1, len(mask), SCAN_TOKENS))
