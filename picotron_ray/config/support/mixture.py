"""Shares of several sources: weights as whole numbers of rows in a cycle, by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from picotron_ray.config.schema.data import MixedSource

CYCLE = 1 << 16
"""Rows of a cycle: weights are kept to 1/65,536."""
MOST_SOURCES = 1 << 10


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Share `CYCLE` rows by weight: the whole parts, and one more where the remainders are largest.

    Raises ValueError for a weight that is not positive and finite, or so small that it has no row.

    >>> quotas([2.0, 1.0, 1.0])
    (32768, 16384, 16384)
    >>> sum(quotas([1.0, 1.0, 1.0]))
    65536
    """
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"saw weights {list(weights)}, expected positive numbers")
    total = math.fsum(weights)
    exact = [weight / total * CYCLE for weight in weights]
    shares = [math.floor(share) for share in exact]
    remainders = sorted(range(len(exact)), key=lambda at: (shares[at] - exact[at], at))
    for at in remainders[: CYCLE - sum(shares)]:
        shares[at] += 1
    for weight, share in zip(weights, shares, strict=True):
        if not share:
            raise ValueError(
                f"saw weight {weight:g} of {total:g} in all, expected 1/{CYCLE} of that at least"
            )
    return tuple(shares)


def weight_at(source: MixedSource, step: int) -> float:
    """Return the weight that holds after ``step`` steps."""
    return next(weight for first, weight in reversed(source.weights.items()) if first <= step)


def shares_by_step(sources: Sequence[MixedSource]) -> dict[int, tuple[int, ...]]:
    """Return the rows of each source in a cycle, by the number of steps before they begin to hold."""
    steps = sorted({step for source in sources for step in source.weights})
    return {step: quotas([weight_at(source, step) for source in sources]) for step in steps}
