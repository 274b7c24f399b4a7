"""Canonical state: names and boxes in the uncut, unfused model. Torch-free.

Every parameter and every optimizer moment is a named n-dimensional tensor of the *whole* model; what
one rank holds of it is a box (offset, size). Snapshots, chunks and restores speak of nothing else, so
any layout restores into any other one. Parameter names are the model's own
(``layers.3.attention.wq.weight``); an AdamW moment is ``exp_avg/<parameter>`` or ``exp_avg_sq/<parameter>``,
Muon's is ``momentum/<parameter>``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """What one rank holds of one canonical tensor; stored row-major (C order), contiguous."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPE_BYTES[self.dtype]
