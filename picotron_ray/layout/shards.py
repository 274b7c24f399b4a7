"""Canonical state: names and boxes in the uncut, unfused model. Torch-free.

Every parameter and every optimizer moment is a named n-dimensional tensor of the *whole* model; what
one rank holds of it is a box (offset, size). Snapshots, chunks and restores speak of nothing else, so
any layout restores into any other one. Parameter names are the model's own
(``layers.3.attention.wq.weight``); an AdamW moment is ``exp_avg/<parameter>`` or ``exp_avg_sq/<parameter>``,
Muon's is ``momentum/<parameter>``, and an average of weights ``ema/<parameter>``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box ``offset .. offset + size`` in a global tensor; scalars have empty tuples."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where the two do not overlap."""
        offset, size = [], []  # a plain loop: restores call this thousands of times
        for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True):
            low = a if a > b else b
            high = a + m if a + m < b + n else b + n
            if high <= low:
                return None
            offset.append(low)
            size.append(high - low)
        return Box(tuple(offset), tuple(size))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one canonical tensor; stored row-major (C order), contiguous."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPE_BYTES[self.dtype]


Array = npt.NDArray[Any]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of that shape."""
    return Box((0,) * len(shape), tuple(shape))


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that make up ``box`` without ``hole``; at most two per dimension."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    rest: list[Box] = []
    offset, size = list(box.offset), list(box.size)
    for axis in range(len(offset)):
        low, high = common.offset[axis], common.offset[axis] + common.size[axis]
        for start, end in ((offset[axis], low), (high, offset[axis] + size[axis])):
            if end > start:
                rest.append(
                    Box(
                        (*offset[:axis], start, *offset[axis + 1 :]),
                        (*size[:axis], end - start, *size[axis + 1 :]),
                    )
                )
        offset[axis], size[axis] = low, high - low
    return rest


def slabs(box: Box, most: int) -> Iterator[Box]:
    """Yield ``box`` in slabs along its first dimension, each of about ``most`` elements or of one row."""
    if not box.size or box.numel <= most:
        yield box
        return
    (low, *offset), (length, *size) = box.offset, box.size
    step = max(1, most // math.prod(size))
    for start in range(low, low + length, step):
        yield Box((start, *offset), (min(step, low + length - start), *size))


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """The parts of ``box`` that no member of ``covers`` holds; empty: it is covered."""
    rest = [box] if box.numel else []
    for cover in covers:
        if not rest:
            break
        rest = [part for piece in rest for part in subtract(piece, cover)]
    return rest


def element_type(dtype: str) -> np.dtype[Any]:
    """The unsigned integer type that carries one element's bits (numpy knows no bfloat16)."""
    return np.dtype(f"u{DTYPE_BYTES[dtype]}")


def as_elements(raw: Any, shard: Shard) -> Array:
    """View a shard's bytes as an array of bit patterns of the box's shape."""
    return np.frombuffer(raw, dtype=element_type(shard.dtype)).reshape(shard.box.size)


def region(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Index of ``inner`` in an array that holds ``outer``."""
    return tuple(
        slice(low - base, low - base + length)
        for low, base, length in zip(inner.offset, outer.offset, inner.size, strict=True)
    )


def copy_common(target: Array, target_box: Box, source: Array, source_box: Box) -> int:
    """Copy what the two boxes have in common; returns the number of elements copied."""
    common = target_box.intersect(source_box)
    if common is None:
        return 0
    target[region(common, target_box)] = source[region(common, source_box)]
    return common.numel
