"""Statistics of a source: how many documents and tokens, how long, how often the same, how full its rows.

Streams are memory-mapped and read once, in order. Of each document its border and a hash of its ids are kept,
16 bytes of memory; equal hashes (64 bits) are taken for equal documents.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.memmap import SCAN_TOKENS
from picotron_ray.data.plan.packed_cache import document_borders
from picotron_ray.data.plan.packed_samples import PackedSamples
from picotron_ray.data.plan.packing import Numbers
from picotron_ray.data.samples import SampleSet, Tokens
from picotron_ray.data.source_samples import open_source, open_splits
from picotron_ray.errors import DataError

Hashes = npt.NDArray[np.uint64]
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class PartStatistics:
    """Statistics of one part of a source, to train on or held out.

    Fields:
        documents: None where no id is known to end one.
        lengths: tokens of a document, its end included: ``mean``, `QUANTILES` and ``longest``; quantiles are
            lengths that a document has.
        duplicates: documents whose tokens an earlier one of this part has.
        counted_share: of the tokens; None without a loss mask.
        rows: of an epoch; None where there are none.
        full: share of the rows that is no padding.
        no_rows: why there are no rows.
    """

    tokens: int
    documents: int | None
    lengths: dict[str, float] | None
    duplicates: int | None
    counted_share: float | None
    rows: int | None
    full: float | None
    no_rows: str | None


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Statistics of a source.

    Fields:
        source: key in the config.
        digest: of its tokens.
        overlap: held-out documents whose tokens a document to train on has, too.
    """

    source: str
    digest: str
    train: PartStatistics
    held_out: PartStatistics
    overlap: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)


def source_statistics(
    key: str, data: DataConfig, model_vocab: int, seed: int, cache_dir: Path
) -> SourceStatistics:
    """Count what a source holds.

    Args:
        key, data, model_vocab, seed, cache_dir: as `open_source` has them.

    Raises DataError where the source cannot be read. One that makes no rows is counted, too.
    """
    splits, end = open_splits(key, data, model_vocab, cache_dir)
    samples: tuple[SampleSet | None, SampleSet | None] = (None, None)
    why = None
    try:
        opened = open_source(key, data, model_vocab, seed, cache_dir)
        samples = (opened.train, opened.held_out)
    except DataError as error:
        why = str(error)
    parts, hashes = [], []
    for at, tokens in enumerate((splits.train, splits.held_out)):
        borders = _borders(tokens, None if splits.ends is None else splits.ends[at], end)
        found = None if borders is None else document_hashes(tokens, borders, end)
        mask = None if splits.masks is None else splits.masks[at]
        parts.append(_part(tokens, borders, found, mask, samples[at], why))
        hashes.append(found)
    train, held = hashes
    overlap = None if train is None or held is None else int(np.isin(held, train).sum())
    return SourceStatistics(key, splits.digest, parts[0], parts[1], overlap)


def document_hashes(tokens: Tokens, borders: Numbers, end: int | None) -> Hashes:
    """Return the hash of each document's ids, without its end: xxh3_64, ``[documents]``.

    Args:
        borders: the first token of each document, and the end of the stream.
    """
    found = np.empty(len(borders) - 1, np.uint64)
    first = 0
    for at, last in enumerate(borders[1:].tolist()):
        stop = last - 1 if last > first and tokens[last - 1] == end else last
        found[at] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens[first:stop]).data)
        first = last
    return found


def _borders(tokens: Tokens, ends: Any, end: int | None) -> Numbers | None:
    if ends is not None:
        whole = np.concatenate([np.zeros(1, np.int64), ends])
        return whole if whole[-1] == len(tokens) else np.append(whole, len(tokens))
    return None if end is None else document_borders(tokens, end)


def _part(
    tokens: Tokens,
    borders: Numbers | None,
    hashes: Hashes | None,
    mask: Tokens | None,
    samples: SampleSet | None,
    why: str | None,
) -> PartStatistics:
    return PartStatistics(
        tokens=len(tokens),
        documents=None if borders is None else len(borders) - 1,
        lengths=None if borders is None or len(borders) < 2 else lengths_of(np.diff(borders)),
        duplicates=None if hashes is None else len(hashes) - len(np.unique(hashes)),
        counted_share=None if mask is None else _sum(mask) / max(1, len(mask)),
        rows=None if samples is None else samples.samples,
        full=None if samples is None else _full(samples),
        no_rows=why,
    )


def lengths_of(lengths: Numbers) -> dict[str, float]:
    """Return mean, quantiles and longest of some lengths.

    >>> lengths_of(np.array([1, 2, 3, 10]))
    {'mean': 4.0, 'p50': 2, 'p90': 10, 'p99': 10, 'longest': 10}
    """
    values = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    found: dict[str, float] = {"mean": round(float(lengths.mean()), 1)}
    found |= dict(zip(QUANTILES, map(int, values), strict=True))
    return found | {"longest": int(lengths.max())}


def _sum(mask: Tokens) -> int:
    return sum(int(mask[at : at + SCAN_TOKENS].sum()) for at in range(0, len(mask), SCAN_TOKENS))


def _full(samples: SampleSet) -> float:
    if not isinstance(samples, PackedSamples):
        return 1.0
    return float(samples.pieces.lengths.sum()) / (samples.samples * (samples.sequence_length + 1))
