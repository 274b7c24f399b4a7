"""Difficulty of samples, and their ranks by it.

Ranks are made once per node and memory-mapped by every worker:
``<cache>/ranks-<key>/order.npy``, samples from the easiest to the hardest. The key is a hash of what decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from picotron_ray.config.schema.curriculum import SCORED, Measure
from picotron_ray.data.cache_folder import open_or_make
from picotron_ray.data.plan.score_files import read_scores
from picotron_ray.data.samples import PADDING, SampleSet
from picotron_ray.data.shuffle import Index

VERSION = 1
CHUNK_ROWS = 1024
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Request for the ranks of a source's samples.

    Fields:
        identity: of the source's samples.
        source: its name in the scores folder.
        end: id that ends a document; None: the samples say where documents are, or nobody asks.
        measures: weight by measure.
        scores: folder of those measures that were written beforehand; None: there are none.
    """

    identity: str
    source: str
    end: int | None
    measures: tuple[tuple[Measure, float], ...]
    scores: Path | None


def ranked(samples: SampleSet, request: RankRequest, folder: Path) -> tuple[Index, str]:
    """Open the ranks of samples in the cache ``folder``, or make them there: int64, the easiest first.

    Returns: the ranks, and their digest.

    Raises DataError for scores that are missing or of other samples, or a cache that cannot be written.
    """
    values = {name: _values(samples, name, request) for name, _ in request.measures if name in SCORED}
    digests = {name: xxhash.xxh3_128_hexdigest(array.tobytes()) for name, array in values.items()}
    words = (VERSION, request.identity, samples.samples, request.end, request.measures, digests)
    place = folder / f"ranks-{xxhash.xxh3_128_hexdigest(json.dumps(words).encode())}"

    def build(fresh: Path) -> None:
        save_digested(fresh / "order.npy", _order(samples, request, values))

    def opened(made: Path) -> tuple[Index, str] | None:
        found = open_digested(made / "order.npy", samples.samples)
        return found if found is not None and len(found[0]) == samples.samples else None

    return open_or_make(place, "ranks of rows", opened, build)


def save_digested(path: Path, numbers: Index) -> None:
    """Write numbers of samples, and their digest beside them."""
    np.save(path, numbers)
    path.with_suffix(".digest").write_text(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(numbers).data))


def open_digested(path: Path, most: int) -> tuple[Index, str] | None:
    """Map numbers of samples, at most so many; None where there is nothing or it is damaged."""
    try:
        numbers, digest = np.load(path, mmap_mode="r"), path.with_suffix(".digest").read_text()
    except (FileNotFoundError, ValueError, EOFError):
        return None
    sound = numbers.ndim == 1 and len(numbers) <= most and numbers.dtype == np.int64 and len(digest) == 32
    return (numbers, digest) if sound else None


def _order(samples: SampleSet, request: RankRequest, known: dict[Measure, Values]) -> Index:
    """Rank by one measure, or by the weighted mean of the ranks by several."""
    total = np.zeros(samples.samples)
    for name, weight in request.measures:
        values = known.get(name)
        found = np.argsort(values if values is not None else _values(samples, name, request), kind="stable")
        if len(request.measures) == 1:
            return found.astype(np.int64)
        ranks = np.empty(samples.samples)
        ranks[found] = np.arange(samples.samples)
        total += weight * ranks
    return np.argsort(total, kind="stable").astype(np.int64)


def _values(samples: SampleSet, measure: Measure, request: RankRequest) -> Values:
    if measure == "length":
        return mean_lengths(samples, request.end)
    if measure == "rarity":
        return rarity(samples)
    assert request.scores is not None, "the config's rules ask for it"
    return read_scores(request.scores, request.source, measure, request.identity, samples.samples)


def mean_lengths(samples: SampleSet, end: int | None) -> Values:
    """Return the mean length of each sample's documents, or of the parts of them that it holds, in tokens."""
    parts = []
    for some in _chunks(samples):
        documents = samples.documents(some)
        if documents is not None:
            real = documents != PADDING
            parts.append(real.sum(axis=1) / (np.where(real, documents, 0).max(axis=1) + 1))
        else:
            inputs = samples.rows(some)[:, :-1]
            ends = 0 if end is None else (inputs[:, :-1] == end).sum(axis=1)
            parts.append(np.full(len(some), inputs.shape[1]) / (1 + np.asarray(ends)))
    return np.concatenate(parts)


def rarity(samples: SampleSet) -> Values:
    """Return the mean of -log(frequency) of each sample's inputs, in nats; frequencies are the samples' own.

    Platanios et al. 2019 sum it over a sentence; rows have one length, and a mean does not ask for padding.
    """
    counts = np.zeros(0, np.int64)
    for some in _chunks(samples):
        tokens, real = _inputs(samples, some)
        found = np.bincount(tokens[real], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    rare = -np.log(np.maximum(counts, 1) / max(1, int(counts.sum())))
    parts = []
    for some in _chunks(samples):
        tokens, real = _inputs(samples, some)
        parts.append((rare[tokens] * real).sum(axis=1) / np.maximum(1, real.sum(axis=1)))
    return np.concatenate(parts)


def _inputs(samples: SampleSet, some: Index) -> tuple[Index, npt.NDArray[np.bool_]]:
    """Read the inputs of samples, and which of them are no padding."""
    inputs, documents = samples.rows(some)[:, :-1], samples.documents(some)
    return inputs, np.ones(inputs.shape, np.bool_) if documents is None else documents != PADDING


def _chunks(samples: SampleSet) -> Iterator[Index]:
    for first in range(0, samples.samples, CHUNK_ROWS):
        yield np.arange(first, min(samples.samples, first + CHUNK_ROWS))
