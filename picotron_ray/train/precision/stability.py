"""Stability of a model's parts in low precision, from their gradients while they train.

Sensitivity says what rounding adds to the loss; a part may be insensitive and yet break. A part is unstable
where its gradient

- overflows: some elements are not finite, or larger than the type holds;
- vanishes: more than ``VANISHED`` of its elements that are not 0 are below the type's least normal number;
- swings: its norm is more than ``SWING`` standard deviations of its logarithm from the mean of the steps
  before, and by more than a factor of 2.

An unstable part rises to full precision at the next boundary of steps, within the generation, and falls back
after ``calm_steps`` steps of which none was unstable. What each rank judges by is summed over all ranks, and
counts from the start of the generation: all decide alike. The numbers are read one step late, when they have
long arrived: nothing waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from picotron_ray.train.precision.gradient_variability import GradientVariability

VANISHED = 0.25
SWING = 5.0
LEAST_FACTOR = math.log(2.0)
LEARNING_STEPS = 20
"""Steps from which the mean and deviation of a norm are known well enough."""
COUNTED_EVERY = 10
"""Steps between two looks at all elements; norms, which show an overflow too, are of every step."""


@dataclass(frozen=True, slots=True)
class GradientFigures:
    """Figures of each part's gradient in a step, the same on every rank.

    Fields:
        norms: Euclidean.
        overflows, vanished: shares of elements; 0.0 in steps in which they are not counted.
    """

    norms: Sequence[float]
    overflows: Sequence[float]
    vanished: Sequence[float]


def figures_of(sums: Sequence[Sequence[float]]) -> GradientFigures:
    """Figures from sums of each part: of squares, and where counted the three numbers of `count_elements`."""
    norms, overflows, vanished = [], [], []
    for squares, *counts in sums:
        over, gone, present = counts or (0.0, 0.0, 1.0)
        norms.append(math.sqrt(squares) if squares >= 0.0 else math.nan)
        overflows.append(over / max(1.0, present))
        vanished.append(gone / max(1.0, present))
    return GradientFigures(norms, overflows, vanished)


class StabilityWatch:
    """Judges parts step by step.

    Args:
        parts: their names, in the order of figures.
        calm_steps: steps without a finding after which a part falls back.

    Fields:
        raised: unstable parts, with the steps that each has been calm for.
    """

    def __init__(self, parts: Sequence[str], calm_steps: int) -> None:
        self._parts, self._calm_steps = list(parts), calm_steps
        self._seen = GradientVariability()
        self.raised: dict[str, int] = {}

    def judge(self, figures: GradientFigures, low: Collection[str]) -> tuple[list[str], list[str]]:
        """Take in a step; returns the parts of ``low`` that rise now, and those that fall back."""
        unstable = {part for at, part in enumerate(self._parts) if self._unstable(figures, at)}
        self._seen.observe(figures.norms)
        rising = [part for part in self._parts if part in unstable & set(low) and part not in self.raised]
        self.raised = {part: 0 if part in unstable else calm + 1 for part, calm in self.raised.items()}
        falling = [part for part, calm in self.raised.items() if calm >= self._calm_steps]
        for part in falling:
            del self.raised[part]
        self.raised |= dict.fromkeys(rising, 0)
        return rising, falling

    def _unstable(self, figures: GradientFigures, at: int) -> bool:
        norm = figures.norms[at]
        if not math.isfinite(norm) or figures.overflows[at] > 0.0 or figures.vanished[at] > VANISHED:
            return True
        if norm == 0.0 or self._seen.steps < LEARNING_STEPS:
            return False
        mean, deviation = self._seen.logarithm(at)
        return abs(math.log(norm) - mean) > max(SWING * deviation, LEAST_FACTOR)


def count_elements(gradient: Tensor, low: torch.dtype, scale: float) -> Tensor:
    """Count elements that overflow in ``low``, vanish there, and are not 0: ``[3]`` fp64 on the device.

    Args:
        scale: by which the gradient is multiplied before it is rounded (fp16's loss scale).
    """
    bounds = torch.finfo(low)
    size = gradient.abs() * scale
    present = size > 0.0
    over, gone = ~(size <= bounds.max), present & (size < bounds.smallest_normal)
    return torch.stack((over.sum(), gone.sum(), present.sum())).double()
