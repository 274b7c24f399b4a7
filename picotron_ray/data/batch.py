"""Batch of one rank in one step, cut from the global batch by the layout alone.

A step feeds the rows that the plan says (`data.plan.sample_plan`), whatever the layout is. Each DP replica
takes a contiguous range of them (``Layout.rows``) and packs it into the same number of micro-batches as
every other replica. A replica with fewer rows has narrower ones (``Layout.micro_batch_rows``). Rows of weight
0 fill what is left, so shapes never change within a layout; they are no samples: not counted, not digested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.data.samples import PADDING, SampleSet
from picotron_ray.data.shuffle import samples_between
from picotron_ray.layout.layout import Layout

_Value = TypeVar("_Value", bound=np.generic)
EVALUATION_SEED = 0  # held-out samples are the same ones whatever the run's seed is


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows of one DP replica in one step.

    Fields:
        step: 1-based optimizer step; 0 for evaluation.
        tokens: int64 ``[micro_batches, rows, sequence_length + 1]``; inputs are all but the last
            token of a row, targets all but the first.
        weights: float64 ``[micro_batches, rows]``; 1 for a real row, 0 for a filler.
        global_tokens: predicted tokens of the whole step over all replicas, padding left out.
        rows: half-open range of global sample numbers that this replica feeds.
        digest: xxh3_128 of the real rows' tokens as little-endian uint32, in order.
        counted: mask of the targets that count, ``[micro_batches, rows, sequence_length]``; None: all do.
        global_counted: how many count in the whole step over all replicas; None: all do.
        documents: number of each input's document within its row, ``[micro_batches, rows, sequence_length]``
            int32; None: the tokens say, or nobody asks.
        tokens_until: tokens of the run up to the end of this step (`Feed.tokens_until`).
        stage: of the curriculum, from 1 on; 0: there is none.
    """

    step: int
    tokens: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]
    global_tokens: int
    rows: tuple[int, int]
    digest: bytes
    counted: npt.NDArray[np.bool_] | None = None
    global_counted: int | None = None
    documents: npt.NDArray[np.int32] | None = None
    tokens_until: int = 0
    stage: int = 0

    @property
    def loss_tokens(self) -> int:
        """Divisor of the step's loss: the tokens that count in it, at least 1."""
        return self.global_tokens if self.global_counted is None else max(1, self.global_counted)

    def tokens_of(self, cp: int, index: int) -> int:
        """Count the tokens whose losses rank ``index`` of ``cp`` that share these rows is to answer for."""
        if self.counted is None:
            return int((self.weights > 0).sum()) * (self.tokens.shape[-1] - 1) // cp
        return int(self.counted.sum()) if index == 0 else 0


def samples_of(step: int, global_batch: int) -> str:
    """Name the samples of a step, both ends included, for people.

    Example:
        >>> samples_of(3, 8)
        'samples 16 to 23'
    """
    return f"samples {(step - 1) * global_batch} to {step * global_batch - 1}"


def token_digest(rows: npt.NDArray[np.int64]) -> bytes:
    """Digest of 16 bytes: xxh3_128 of the tokens as little-endian uint32, row after row."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(rows, dtype="<u4").data)


def _batch(
    step: int,
    dataset: SampleSet,
    samples: npt.NDArray[np.int64],
    numbers: tuple[int, int],
    shape: tuple[int, int],
    totals: tuple[int, int | None],
) -> StepBatch:
    """Put real rows first, then fillers, into ``shape`` (micro-batches, rows of each)."""
    rows, counted, documents = dataset.rows(samples), dataset.counted(samples), dataset.documents(samples)
    return StepBatch(
        step=step,
        tokens=_filled(rows, shape),
        weights=_filled(np.ones(len(rows)), shape),
        global_tokens=totals[0],
        rows=numbers,
        digest=token_digest(rows),
        counted=None if counted is None else _filled(counted, shape),
        global_counted=totals[1],
        documents=None if documents is None else _filled(documents, shape),
    )


def _filled(values: npt.NDArray[_Value], shape: tuple[int, int]) -> npt.NDArray[_Value]:
    """Lay out rows as micro-batches, with zeros behind them."""
    out = np.zeros((shape[0] * shape[1], *values.shape[1:]), values.dtype)
    out[: len(values)] = values
    return out.reshape(*shape, *values.shape[1:])


def batch_shape(layout: Layout, dp_index: int, global_batch: int) -> tuple[int, int]:
    """Micro-batches of one DP replica in a step, and rows of each."""
    return layout.micro_batches(global_batch), layout.micro_batch_rows(dp_index, global_batch)


def make_batch(feed: Feed, layout: Layout, dp_index: int, step: int) -> StepBatch:
    """Make the training batch of one DP replica at ``step`` (1-based)."""
    feed = feed.known(step)
    base, end = feed.plan.numbers(step)
    first, last = (base + at for at in layout.rows(dp_index, end - base))
    shape = batch_shape(layout, dp_index, end - base)
    mine = feed.plan.samples(first, last)
    found = _batch(step, feed.dataset, mine, (first, last), shape, feed.totals(base, end))
    if (width := feed.width(step)) is not None:
        found = replace(found, documents=_parted(found, width))
    return replace(found, tokens_until=feed.tokens_until(step), stage=feed.stage(step))


def _parted(batch: StepBatch, width: int) -> npt.NDArray[np.int32]:
    """Number the documents of rows that are read as pieces of ``width`` tokens."""
    known = batch.documents
    length = batch.tokens.shape[-1] - 1
    pieces = np.broadcast_to(np.arange(length, dtype=np.int32) // width, (*batch.tokens.shape[:-1], length))
    if known is None:
        return np.ascontiguousarray(pieces)
    changes = np.zeros(known.shape, np.bool_)
    changes[..., 1:] = (np.diff(known) != 0) | (np.diff(pieces) != 0)
    return np.where(known == PADDING, PADDING, changes.cumsum(axis=-1)).astype(np.int32)


def eval_batches(
    dataset: SampleSet, layout: Layout, dp_index: int, samples: int, global_batch: int
) -> list[StepBatch]:
    """Cut one DP replica's part of the fixed evaluation samples into batches of the training shape.

    Always the same ``samples`` (or all, if there are fewer) samples of ``dataset``, spread over the whole
    of it by a fixed permutation. ``global_tokens`` of a batch counts that batch alone: the mean loss is
    the sum of losses over the sum of ``global_tokens``.
    """
    wanted = min(samples, dataset.samples)
    chosen = samples_between(EVALUATION_SEED, 0, wanted, dataset.samples)
    shape = batch_shape(layout, dp_index, global_batch)
    batches = []
    for base in range(0, wanted, global_batch):
        size = min(global_batch, wanted - base)
        first, last = (base + end for end in layout.rows(dp_index, size))
        totals = dataset.totals(chosen[base : base + size])
        batches.append(_batch(0, dataset, chosen[first:last], (first, last), shape, totals))
    return batches
