"""Predict the memory that steps will take, from those that were measured. Torch-free.

The peak over steps is a line through the recent ones: its slope is the median of all pairs' (Theil 1950; Sen
1968), which a few outliers do not move, and it lies as far up as the highest of them. Without history a class
takes what the planner says times a factor for what the planner does not see (fragments, workspaces).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

GROWTH: Mapping[str, float] = {"activation": 1.2, "gradient": 1.2, "optimizer": 1.1, "temporary": 1.3}
"""Factor of an estimate without history, by class of memory."""
RECENT = 32
"""Measurements that a prediction looks at: the pairs of more would take longer than they tell."""
FEWEST = 3
"""Measurements that make a line."""
MOST_GROWTH = 2.0
"""x the largest measurement: no line is believed beyond."""


def predicted_peak(measured: Sequence[tuple[int, float]], step: int) -> float:
    """Bytes that the steps up to ``step`` will take at most; 0 where nothing is known.

    Args:
        measured: step and bytes, in any order; what is not finite or negative is left out. Fewer than
            three say nothing of a trend and count with the factor of temporaries.

    >>> predicted_peak([(10, 100.0), (20, 110.0), (30, 120.0)], 50)
    140.0
    >>> predicted_peak([(10, 120.0), (20, 110.0), (30, 100.0)], 50)
    120.0
    """
    known = sorted((at, size) for at, size in measured if math.isfinite(size) and size >= 0)[-RECENT:]
    if not known:
        return 0.0
    most = max(size for _, size in known)
    if len({at for at, _ in known}) < FEWEST:
        return most * GROWTH["temporary"]
    last = known[-1][0]
    slope = median((b - a) / (t - s) for (s, a), (t, b) in combinations(known, 2) if t != s)
    above = max(size - slope * (at - last) for at, size in known)  # of the line through the highest point
    return min(max(most, above + slope * (step - last)), MOST_GROWTH * most)


def predicted_class(kind: str, estimate_bytes: float, ratios: Sequence[float]) -> float:
    """Bytes that a class of memory will take in a generation.

    Args:
        kind: a key of `GROWTH`.
        estimate_bytes: what the planner says of the generation's layout.
        ratios: of earlier generations, newest last: measured bytes over the planner's. Without any the
            class's growth factor counts.
    """
    known = [ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0][-RECENT:]
    factor = min(max(known), MOST_GROWTH) if known else GROWTH[kind]
    return estimate_bytes * factor


def ratio_of(measured_bytes: float, estimate_bytes: float) -> float | None:
    """Measured over estimated; None where there is no estimate to hold it against.

    >>> ratio_of(3.0, 2.0), ratio_of(3.0, 0.0)
    (1.5, None)
    """
    return measured_bytes / estimate_bytes if estimate_bytes > 0 and math.isfinite(measured_bytes) else None
