"""How much the gradients of each part of a model swing in training, by which adaptive precision is revised.

The error that low precision adds is measured at the weights of a generation's beginning. How far it may move
before the next one is judged by how far the part's gradient norm has moved from step to step so far: the
standard deviation of its logarithm, as a factor. A worker keeps these numbers over generations; whoever is
new has none, and all ranks take the largest that any of them knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

MEMORY_STEPS = 50
"""Over about how many of the last steps the deviation is taken (exponential weights)."""


class GradientVariability:
    """Running mean and variance of the logarithm of every part's gradient norm."""

    def __init__(self) -> None:
        self._steps = 0
        self._mean: list[float] = []
        self._variance: list[float] = []

    def observe(self, norms: Sequence[float]) -> None:
        """Take in a step's gradient norms, one per part in one order; what is 0 or no number says nothing.

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

    def margins(self, parts: int) -> list[float]:
        """By which factor each part's norm has swung (one standard deviation); 1 where nothing is known."""
        return [math.exp(math.sqrt(value)) for value in self._variance] or [1.0] * parts


def part_of_each(names: Iterable[str], parts: Sequence[str]) -> list[int]:
    """The number of the part that each parameter belongs to; -1: none."""
    place = {part: number for number, part in enumerate(parts)}
    found = []
    for name in names:
        path = name.split(".")
        heads = (".".join(path[:depth]) for depth in range(len(path), 0, -1))
        found.append(next((place[head] for head in heads if head in place), -1))
    return found
