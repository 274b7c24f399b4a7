"""Arithmetic of boxes: what is covered, what is missing, and copying the common part of two. Torch-free.

Restores and manifests cover tensors with boxes that came from any mix of layouts; pieces may repeat
(replicas) or cut each other. ``uncovered`` is the one judge of "the whole tensor is there".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from picotron_ray.checkpoint.canonical import DTYPE_BYTES, Box, Shard

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
