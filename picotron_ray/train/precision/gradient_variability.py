"""Variability of the gradients of a model's parts, by which adaptive precision takes a margin.

The error of low precision is measured once, on the weights at the beginning of a generation. It drifts until
the next one. The drift is estimated from the steps so far: the standard deviation of the logarithm of the
part's gradient norm, as a factor. A worker keeps these numbers over generations. A new worker has none, and
all ranks take the maximum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

MEMORY_STEPS = 50
"""Number of recent steps, about, in the deviation (exponential weights)."""


class GradientVariability:
    """Running mean and variance of the logarithm of every part's gradient norm."""

    def __init__(self) -> None:
        self._steps = 0
        self._mean: list[float] = []
        self._variance: list[float] = []

    def observe(self, norms: Sequence[float]) -> None:
        """Add a step's gradient norms, one per part in one order. A norm of 0, infinity or NaN is left out.

        West 1979, Updating Mean and Variance Estimates, with weights that fade.
        """
        if not self._mean:
            self._mean, self._variance = [math.nan] * len(norms), [0.0] * len(norms)
        self._steps += 1
        share = max(1.0 / self._steps, 1.0 / MEMORY_STEPS)
        for part, norm in enumerate(norms):
            if not (norm > 0.0 and math.isfinite(norm)):
                continue
            log = math.log(norm)
            if math.isnan(self._mean[part]):
                self._mean[part] = log
            moved = log - self._mean[part]
            self._mean[part] += share * moved
            self._variance[part] = (1.0 - share) * (self._variance[part] + share * moved * moved)

    @property
    def steps(self) -> int:
        """Steps that were observed."""
        return self._steps

    def logarithm(self, part: int) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of a part's norm; NaN where nothing is known."""
        return self._mean[part], math.sqrt(self._variance[part])

    def margins(self, parts: int) -> list[float]:
        """Return each part's factor of one standard deviation; 1 where nothing is known."""
        return [math.exp(math.sqrt(value)) for value in self._variance] or [1.0] * parts


def part_of_each(names: Iterable[str], parts: Sequence[str]) -> list[int]:
    """Return the index of the part that each parameter belongs to; -1: none."""
    place = {part: number for number, part in enumerate(parts)}
    found = []
    for name in names:
        path = name.split(".")
        heads = (".".join(path[:depth]) for depth in range(len(path), 0, -1))
        found.append(next((place[head] for head in heads if head in place), -1))
    return found
