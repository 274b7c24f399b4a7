"""From the tensors of a Hugging Face checkpoint to our parameters, as `Held` says: shapes and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from picotron_ray.models.huggingface.mapping import Held

Array = np.ndarray[Any, Any]

GROUP = 32
"""Values of MXFP4 that share a scale, two of them in a byte (Open Compute Project 2023, Microscaling)."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
_BIAS, _NAN = 127, 255


def their_shapes(held: Held, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shape that each tensor of the checkpoint must have, given those of our parameters."""
    first, *rest = shapes[held.ours[0]]
    if held.stacked:
        return [tuple(rest)] * len(held.theirs)
    if held.in_turns:
        joined = (first, len(held.ours) * rest[0], *rest[1:])
    else:
        joined = (sum(shapes[name][0] for name in held.ours), *rest) if len(held.ours) > 1 else (first, *rest)
    if held.packed:
        *outer, inner = joined
        return [(*outer, inner // GROUP, GROUP // 2), (*outer, inner // GROUP)]
    if held.transposed and len(joined) > 1:
        joined = (*joined[:-2], joined[-1], joined[-2])
    return [joined]


def unpacked(blocks: Array, scales: Array, dtype: str) -> Array:
    """Values that MXFP4 stands for.

    Args:
        blocks: uint8 ``[..., groups, 16]``, the first of two values in the lower half of a byte.
        scales: uint8 ``[..., groups]``, exponents of 2 plus 127; 255 stands for NaN.
        dtype: of the result, fp32 or fp64, in which every value is exact.

    Returns: ``[..., groups x 32]``.
    """
    values = _VALUES.astype(dtype)
    found = np.empty((*blocks.shape[:-1], GROUP), dtype)
    found[..., 0::2], found[..., 1::2] = values[blocks & 15], values[blocks >> 4]
    times = np.ldexp(np.ones((), dtype), scales.astype(np.int32) - _BIAS)
    times[scales == _NAN] = np.nan
    found *= times[..., None]
    return found.reshape(*blocks.shape[:-2], -1)


def ours_of(held: Held, parts: Sequence[Array], shapes: Mapping[str, tuple[int, ...]]) -> list[Array]:
    """Our parameters of a `Held`, in its order.

    Args:
        parts: the tensors that hold them; of packed ones what they stand for, alone.
    """
    whole = np.stack(parts) if held.stacked else parts[0]
    whole = whole.swapaxes(-1, -2) if held.transposed and whole.ndim > 1 else whole
    whole = whole if held.rows is None else whole[list(held.rows)]
    if held.in_turns:
        return [whole[:, place :: len(held.ours)] for place in range(len(held.ours))]
    ends = np.cumsum([shapes[name][0] for name in held.ours])
    return np.split(whole, ends[:-1])
