"""Bigram baseline: the loss of a table of token pairs, which a model must beat to have learned more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from picotron_ray.data.samples import Tokens

MOST_TOKENS = 8_000_000  # more change the fourth digit and cost seconds
DENSE = 1 << 24  # up to this many distinct values a table beats sorting


def bigram_entropy(tokens: Tokens) -> float:
    """Empirical conditional entropy H(next | previous) in nats per token of the first 8 million tokens.

    ``-sum over pairs of p(a, b) ln(p(a, b) / p(a))``: the loss of the best bigram table *for these very
    tokens*, so it is a little below what a table counted on training data would reach on them.
    """
    part = np.asarray(tokens[:MOST_TOKENS]).astype(np.int64)
    if len(part) < 2:
        return 0.0
    pairs = _counts(part[:-1] * (int(part.max()) + 1) + part[1:])
    firsts = _counts(part[:-1])
    return float((firsts * np.log(firsts)).sum() - (pairs * np.log(pairs)).sum()) / (len(part) - 1)


def _counts(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count each distinct value; the counts are in no particular order."""
    if int(values.max()) < DENSE:
        counts = np.bincount(values)
        return counts[counts > 0]
    return np.unique(values, return_counts=True)[1]
