"""Plain stochastic gradient descent, without momentum: the optimizer that tests compare layouts with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from picotron_ray.train.optim.adamw_offload import ParameterGroup


class SGD:
    """w ← (1 - rate · decay) w - rate · gradient, without state."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self._groups = groups
        self.moments: dict[str, dict[str, Tensor]] = {}

    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """Update once."""
        for group in self._groups:
            own = rate * group.factor
            torch._foreach_mul_(group.weights, 1.0 - own * group.decay)
            torch._foreach_add_(group.weights, [gradients[i] for i in group.indices], alpha=-own)
