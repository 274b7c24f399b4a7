"""Rows of a step, for people: where they come from, what they say, and what of it counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from picotron_ray.data.batch import StepBatch
from picotron_ray.data.plan.mixed_samples import MixedSamples
from picotron_ray.data.plan.packed_samples import PackedSamples
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.data.samples import PADDING
from picotron_ray.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ShownPart:
    """Part of a row: of one document, some of whose tokens may count.

    Fields:
        first, last: half-open range of its tokens in the row.
        stream: place of its first token in the source's training tokens; None: it is padding.
        counted: ranges of its tokens, in the row, that count as targets; the first one of a document never
            does.
        texts: what it says, in runs that count or do not, and whether they do; nothing for padding. The first
            token goes with those after it.
    """

    first: int
    last: int
    stream: int | None
    counted: tuple[tuple[int, int], ...]
    texts: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class ShownRow:
    """Row of a step.

    Fields:
        row: its global number.
        source: its source, by the name that the config gives it; "" where there is one.
        sample: its number among the samples of that source.
    """

    row: int
    source: str
    sample: int
    parts: tuple[ShownPart, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return asdict(self)


def shown_rows(
    feed: Feed, batch: StepBatch, names: tuple[str, ...], tokenizer: Tokenizer
) -> Iterator[ShownRow]:
    """Yield the real rows of a batch that was made from a feed.

    Args:
        names: of the sources; one without a name where the config has no list.
    """
    first, last = batch.rows
    samples = feed.known(batch.step).plan.samples(first, last)
    width = batch.tokens.shape[-1]
    tokens = batch.tokens.reshape(-1, width)
    counted = None if batch.counted is None else batch.counted.reshape(-1, width - 1)
    documents = None if batch.documents is None else batch.documents.reshape(-1, width - 1)
    for at in range(last - first):
        source, sample, places = _origin(feed, int(samples[at]), width)
        row_counted = np.ones(width - 1, np.bool_) if counted is None else counted[at]
        row_documents = np.zeros(width - 1, np.int32) if documents is None else documents[at]
        parts = _parts(tokens[at], row_counted, row_documents, places, tokenizer)
        yield ShownRow(first + at, names[source], sample, tuple(parts))


def _origin(feed: Feed, sample: int, width: int) -> tuple[int, int, npt.NDArray[np.int64]]:
    """Say of which source a sample is, its number there, and where in the stream its tokens stand."""
    source, dataset = 0, feed.dataset
    if isinstance(dataset, MixedSamples):
        while sample >= dataset.parts[source].samples:
            sample, source = sample - dataset.parts[source].samples, source + 1
        dataset = dataset.parts[source]
    if isinstance(dataset, PackedSamples):
        return source, sample, dataset.places(sample)
    return source, sample, np.arange(width, dtype=np.int64) + sample * (width - 1)


def _parts(
    tokens: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    documents: npt.NDArray[np.int32],
    places: npt.NDArray[np.int64],
    tokenizer: Tokenizer,
) -> Iterator[ShownPart]:
    """Cut a row where its documents end. The last token, which is no input, goes with the one before it."""
    numbers = np.append(documents, documents[-1] if places[-1] >= 0 else PADDING)
    edges = np.flatnonzero(np.diff(numbers)) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(tokens)], strict=True):
        padded = numbers[first] == PADDING and places[first] < 0
        # the target in place i is the row's token i + 1
        targets = np.zeros(last - first, np.bool_)
        targets[1:] = counted[first : last - 1]
        texts = () if padded else tuple(_texts(tokens[first:last], targets, tokenizer))
        yield ShownPart(first, last, None if padded else int(places[first]), _ranges(targets, first), texts)


def _texts(
    tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.bool_], tokenizer: Tokenizer
) -> Iterator[tuple[str, bool]]:
    told = np.append(targets[1:2], targets[1:]) if len(targets) > 1 else targets
    edges = [0, *(np.flatnonzero(np.diff(told)) + 1).tolist(), len(tokens)]
    for first, last in pairwise(edges):
        yield tokenizer.decode(tokens[first:last].tolist()), bool(told[first])


def _ranges(mask: npt.NDArray[np.bool_], base: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open ranges where a mask holds.

    >>> _ranges(np.array([False, True, True, False, True]), 10)
    ((11, 13), (14, 15))
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return tuple((base + int(one), base + int(other)) for one, other in edges.reshape(-1, 2))
