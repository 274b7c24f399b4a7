"""Shuffled order of samples: a seeded permutation that is computed, never stored.

``sample_index`` maps a position of an epoch to a sample by a balanced Feistel network over the smallest
even number of bits that holds ``n``, walking its cycles until the value is below ``n`` (Black & Rogaway
2002, "Ciphers with arbitrary finite domains"). So the order is a pure function of (seed, epoch,
position): no state but one cursor, no memory for a shuffled list, and any rank of any layout finds any
row by itself. Changing anything here changes every run of the same seed: ``ORDER_VERSION`` is part of the
data fingerprint.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1
ROUNDS = 8
Index = npt.NDArray[np.int64]
_Word = npt.NDArray[np.uint64]


def _mix(x: _Word) -> _Word:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> _Word:
    """One 64-bit key per round from (seed, epoch)."""
    words = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64)
    return words.astype(np.uint64)


def _feistel(x: _Word, keys: _Word, half_bits: int) -> _Word:
    """One pass of the network over ``2 x half_bits`` bits: a bijection whatever the round function is."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def sample_index(seed: int, epoch: int, position: npt.ArrayLike, n: int) -> Index:
    """Samples at ``position`` (0-based, below ``n``) of epoch ``epoch``; vectorised.

    For fixed (seed, epoch) this is a permutation of ``range(n)``.
    """
    start = np.asarray(position, dtype=np.int64)
    if n < 1 or (start.size and (start.min() < 0 or start.max() >= n)):
        raise ValueError(f"positions must lie in 0..{n - 1}, got {start.min()}..{start.max()}")
    keys = _round_keys(seed, epoch)
    half_bits = max(1, -(-(n - 1).bit_length() // 2))
    values = _feistel(start.astype(np.uint64).ravel(), keys, half_bits)
    while (outside := np.nonzero(values >= n)[0]).size:
        values[outside] = _feistel(values[outside], keys, half_bits)
    return values.astype(np.int64).reshape(start.shape)


def samples_between(seed: int, first: int, last: int, n: int) -> Index:
    """Samples with global numbers ``first .. last`` (half-open), across epochs.

    The global number counts samples fed since the start of the run; ``n`` samples are one epoch.
    """
    parts = []
    while first < last:
        epoch, position = divmod(first, n)
        stop = min(last, (epoch + 1) * n)
        parts.append(sample_index(seed, epoch, np.arange(position, position + stop - first), n))
        first = stop
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
