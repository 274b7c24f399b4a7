"""Baseline of a figure: median and median absolute deviation of its newest ordinary values."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

LEAST = 12
"""Values without which there is no baseline."""
MOST = 64
TO_DEVIATION = 1.4826
"""Standard deviations per median absolute deviation of a normal distribution (Rousseeuw and Croux 1993)."""


class Baseline:
    """The newest `MOST` values, sorted as they come.

    >>> seen = Baseline()
    >>> for value in (9.0, 10.0, 11.0) * 4:
    ...     seen.add(value)
    >>> seen.median, round(seen.spread, 2)
    (10.0, 1.48)
    """

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def ready(self) -> bool:
        """Whether there are enough values."""
        return len(self._sorted) >= LEAST

    @property
    def count(self) -> int:
        return len(self._sorted)

    @property
    def median(self) -> float:
        """Median of the values; of an even number of them the mean of the middle ones."""
        return _median(self._sorted)

    @property
    def spread(self) -> float:
        """Standard deviation, by the median absolute deviation."""
        middle = self.median
        return TO_DEVIATION * _median(sorted(abs(value - middle) for value in self._sorted))

    def add(self, value: float) -> None:
        """Take a value; the oldest goes where they are too many."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > MOST:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def clear(self) -> None:
        """Forget all values."""
        self._order.clear()
        self._sorted.clear()


def _median(values: list[float]) -> float:
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
