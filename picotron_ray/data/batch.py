"""Batch of one rank in one step, cut from the global batch by the layout alone.

A step feeds the rows that the plan says (`data.plan.sample_plan`), whatever the layout is. Each DP replica
takes a contiguous range of them (``Layout.rows``) and packs it into the same number of micro-batches as
every other replica. A replica with fewer rows has narrower ones (``Layout.micro_batch_rows``). Rows of weight
0 fill what is left, so shapes never change within a layout; they are no samples: not counted, not digested.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.data.samples import Dataset
from picotron_ray.data.shuffle import samples_between
from picotron_ray.layout.layout import Layout

EVALUATION_SEED = 0  # held-out samples are the same ones whatever the run's seed is


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows of one DP replica in one step.

    Fields:
        step: 1-based optimizer step; 0 for evaluation.
        tokens: int64 ``[micro_batches, rows, sequence_length + 1]``; inputs are all but the last
            token of a row, targets all but the first.
        weights: float64 ``[micro_batches, rows]``; 1 for a real row, 0 for a filler.
        global_tokens: predicted tokens of the whole step over all replicas.
        rows: half-open range of global sample numbers that this replica feeds.
        digest: xxh3_128 of the real rows' tokens as little-endian uint32, in order.
        counted: mask of the targets that count, ``[micro_batches, rows, sequence_length]``; None: all do.
        global_counted: how many count in the whole step over all replicas; None: all do.
    """

    step: int
    tokens: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]
    global_tokens: int
    rows: tuple[int, int]
    digest: bytes
    counted: npt.NDArray[np.bool_] | None = None
    global_counted: int | None = None

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


def _pack(
    step: int,
    rows: npt.NDArray[np.int64],
    numbers: tuple[int, int],
    shape: tuple[int, int],
    global_samples: int,
    counted: npt.NDArray[np.bool_] | None = None,
    global_counted: int | None = None,
) -> StepBatch:
    """Pack real rows first, then fillers, into ``shape`` (micro-batches, rows of each)."""
    places, width = shape[0] * shape[1], rows.shape[1]
    tokens = np.zeros((places, width), np.int64)
    tokens[: len(rows)] = rows
    weights = np.zeros(places)
    weights[: len(rows)] = 1.0
    mask = None
    if counted is not None:
        mask = np.zeros((places, width - 1), np.bool_)
        mask[: len(rows)] = counted
    return StepBatch(
        step=step,
        tokens=tokens.reshape(*shape, width),
        weights=weights.reshape(shape),
        global_tokens=global_samples * (width - 1),
        rows=numbers,
        digest=token_digest(rows),
        counted=None if mask is None else mask.reshape(*shape, width - 1),
        global_counted=global_counted,
    )


def _total(counted: npt.NDArray[np.bool_] | None) -> int | None:
    return None if counted is None else int(counted.sum())


def batch_shape(layout: Layout, dp_index: int, global_batch: int) -> tuple[int, int]:
    """Micro-batches of one DP replica in a step, and rows of each."""
    return layout.micro_batches(global_batch), layout.micro_batch_rows(dp_index, global_batch)


def make_batch(feed: Feed, layout: Layout, dp_index: int, step: int) -> StepBatch:
    """Make the training batch of one DP replica at ``step`` (1-based)."""
    base, end = feed.plan.numbers(step)
    first, last = (base + at for at in layout.rows(dp_index, end - base))
    mine, total = feed.counted(first, last), None
    if mine is not None:  # the masks of all replicas' rows: their sum needs no message
        total = _total(feed.counted(base, end))
    shape = batch_shape(layout, dp_index, end - base)
    return _pack(step, feed.rows(first, last), (first, last), shape, end - base, mine, total)


def eval_batches(
    dataset: Dataset, layout: Layout, dp_index: int, samples: int, global_batch: int
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
        mine = chosen[first:last]
        counted, total = dataset.counted(mine), _total(dataset.counted(chosen[base : base + size]))
        batches.append(_pack(0, dataset.rows(mine), (first, last), shape, size, counted, total))
    return batches
