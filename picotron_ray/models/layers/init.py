"""Initial weights that depend on (seed, name, position) alone.

Any box of any tensor is drawn without the rest of it, so a rank draws its own part and no broadcast is
needed: the first step is the same at every layout. Words come from numpy's counter-based generator
Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its key is a digest of
seed and name, its counter says where in the tensor. A counter gives eight numbers, and each row (last
dimension) begins a new one. Two words of 32 bits become two normal numbers (Box and Muller 1958).

Logarithm, sine and cosine are polynomials here, of additions and products alone, which IEEE 754 rounds alike
everywhere. A library's own differ between processors in the last bit, and replicas on unlike machines would
not start equal. Numbers are fp32 and cast afterwards, so fp64 and bf16 runs start from the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from picotron_ray.layout.shards import Box, whole

VERSION = 2
"""Of the values. 1: each tensor one sequence of numpy's ``standard_normal``, drawn whole."""
PER_COUNTER = 8  # numbers
PIECE = 1 << 16  # numbers made at once: they stay in the processor's second cache

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# Chebyshev interpolants on [1, 2) around 1.5, and of x squared on [0, 1/4]; their errors: 4e-8, 2e-8, 5e-8.
_LOG = (
    0.4054651081081642,
    0.6666661755433716,
    -0.2222219263878985,
    0.09879144544904198,
    -0.04939838362982907,
    0.025969792103051764,
    -0.014410552892181983,
    0.01023817975208955,
    -0.006006605050865348,
)
_SINE_PI = (
    3.1415926400772016,
    -5.167710076668165,
    2.550077386526186,
    -0.5982904112667203,
    0.07765591224331467,
)
_COSINE_PI = (0.999999953027512, -4.934792802489427, 4.058410790762133, -1.3318729727851486, 0.21968242357146)


def initial_value(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    *,
    init_std: float | None,
    init_bound: float | None = None,
    box: Box | None = None,
) -> torch.Tensor:
    """Return a box of the initial value (fp32, CPU) of one canonical parameter.

    Takes about 2 MiB beside the result.

    Args:
        name: canonical name, e.g. ``layers.3.attention.wq.weight``.
        shape: full shape of the uncut parameter.
        seed: ``job.seed``.
        init_std: ``ParameterSpec.init_std``: standard deviation, or None for all ones.
        init_bound: ``ParameterSpec.init_bound``: half the width of a uniform value around zero, or None.
        box: which part of it; None: all.
    """
    box = box or whole(shape)
    draw, spread = (normal, init_std) if init_bound is None else (uniform, init_bound)
    if spread is None:
        return torch.ones(box.size, dtype=torch.float32)
    result = np.empty(box.size, np.float32)
    rows, columns = _rows_and_columns(shape, box)
    if result.size:
        key = xxhash.xxh3_128_intdigest(f"{seed}/{name}".encode())
        flat, done = result.reshape(len(rows), columns[1]), 0
        for piece in _pieces(key, rows, columns, shape[-1] if shape else 1, draw):
            np.multiply(piece, np.float32(spread), out=flat[done : done + len(piece)])
            done += len(piece)
    return torch.from_numpy(result)


def _rows_and_columns(shape: tuple[int, ...], box: Box) -> tuple[Rows, tuple[int, int]]:
    """Numbers of the rows (of the whole tensor) that a box touches, ascending; its first column and width."""
    rows = np.zeros(1, np.int64)
    for length, low, size in zip(shape[:-1], box.offset[:-1], box.size[:-1], strict=True):
        rows = (rows[:, None] * length + np.arange(low, low + size)).reshape(-1)
    return rows, (box.offset[-1], box.size[-1]) if shape else (0, 1)


def _pieces(
    key: int, rows: Rows, columns: tuple[int, int], length: int, draw: Callable[[Words], Floats]
) -> Iterator[Floats]:
    """Numbers that ``draw`` makes of words, a few rows at a time, [rows, columns]."""
    low, width = columns
    first, end = low // PER_COUNTER, -(-(low + width) // PER_COUNTER)
    a_row = -(-length // PER_COUNTER)
    generator, at = np.random.Philox(key=key), 0
    step = max(1, PIECE // ((end - first) * PER_COUNTER))
    for some in range(0, len(rows), step):
        words = []
        for start, count in _runs(rows[some : some + step], first, end - first, a_row):
            generator.advance(start - at)
            words.append(generator.random_raw(4 * count))
            at = start + count
        drawn = np.concatenate(words) if len(words) > 1 else words[0]
        lead = low - first * PER_COUNTER
        yield draw(drawn).reshape(-1, (end - first) * PER_COUNTER)[:, lead : lead + width]


def _runs(rows: Rows, first: int, width: int, a_row: int) -> Iterator[tuple[int, int]]:
    """Runs of counters, (start, count): one for all rows where they follow each other, else one a row."""
    if width == a_row and rows[-1] - rows[0] == len(rows) - 1:
        yield int(rows[0]) * a_row, len(rows) * a_row
        return
    for row in rows.tolist():
        yield row * a_row + first, width


def uniform(words: Words) -> Floats:
    """Return two numbers between -1 and 1 for each word of 64 bits: odd multiples of 2^-23, all as likely."""
    halves = words.astype("<u8", copy=False).view("<u4")
    odd = (halves >> 9).astype(np.int32) * np.int32(2) + np.int32(1 - (1 << 23))
    return odd.astype(np.float32) * np.float32(2.0**-23)


def normal(words: Words) -> Floats:
    """Return two standard normal numbers for each word of 64 bits, in order: its low half says how far from
    zero the pair of them is, its high half in which direction."""
    halves = words.astype("<u8", copy=False).view("<u4").reshape(-1, 2)
    radius = _radius(halves[:, 0])
    angle = np.ascontiguousarray(halves[:, 1]).view(np.int32).astype(np.float32)
    angle *= np.float32(2.0**-32)  # half of it, in half turns
    square = angle * angle
    sine = _polynomial(_SINE_PI, square)
    sine *= angle
    cosine = _polynomial(_COSINE_PI, square)
    pairs = np.empty((len(radius), 2), np.float32)
    cosine *= sine
    cosine *= radius
    np.add(cosine, cosine, out=pairs[:, 1])  # sin 2x = 2 sin x cos x
    sine *= sine
    sine *= np.float32(-2)
    sine += np.float32(1)
    np.multiply(sine, radius, out=pairs[:, 0])  # cos 2x = 1 - 2 sin^2 x
    return pairs.reshape(-1)


def _radius(words: npt.NDArray[np.uint32]) -> Floats:
    """sqrt(-2 ln u) for u = words / 2^32, a zero counted as a one."""
    bits = (words | np.uint32(1)).astype(np.float32).view(np.int32)
    exponent = (bits >> 23).astype(np.float32)
    exponent -= np.float32(127 + 32)
    bits &= 0x7FFFFF
    bits |= 0x3F800000  # the mantissa, in [1, 2)
    mantissa = bits.view(np.float32)
    mantissa -= np.float32(1.5)
    result = _polynomial(_LOG, mantissa)
    exponent *= np.float32(math.log(2))
    result += exponent
    result *= np.float32(-2)
    np.maximum(result, 0, out=result)
    return np.sqrt(result, out=result)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Sum of ``coefficients[i] x^i`` by Horner's rule."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result *= x
        result += np.float32(coefficient)
    return result
