"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, Mixed Precision Training, section 3.2).

Small gradients vanish in fp16. So the loss is multiplied before the backward pass, and the gradients divided
after it. If one overflows, the usual loop drops the batch. Here the same batch is computed again with half
the scale: no sample is skipped, and the ledger stays exact. The scale is part of the training state, so that
a restored run goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


class Scaling(Protocol):
    """The factor of the loss in a step, and its life from one step to the next."""

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        ...

    def tensors(self) -> Sequence[Tensor]:
        """List what checkpoints keep; the same storage for good."""
        ...

    def initialise(self) -> None:
        """Begin a run."""

    def begin(self) -> None:
        """Begin a step, from the state of the last one."""

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place."""

    def fits(self, norm: Tensor | float) -> bool:
        """Return whether gradients of this norm can be used; if not, another try has another scale."""
        ...

    def step(self) -> None:
        """Take the step's result over into the state: with the weights, not before."""


class NoScaling:
    """The scaling of formats that need none: a factor of 1."""

    scale = 1.0

    def tensors(self) -> Sequence[Tensor]:
        """List nothing."""
        return ()

    def initialise(self) -> None:
        """Begin a run."""

    def begin(self) -> None:
        """Begin a step."""

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Leave the gradients as they are."""

    def fits(self, norm: Tensor | float) -> bool:
        """Accept every norm."""
        return True

    def step(self) -> None:
        """Keep nothing."""


class LossScaler:
    """The scale of fp16, and its age. All ranks see the same norms, and so keep the same scale.

    Fields:
        state: ``[2]``, fp32: the scale, and the number of steps since it last changed.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.zeros(2, device=device)
        self._scale, self._steps = math.nan, 0  # until a step begins: a loss without it must not look right

    def tensors(self) -> Sequence[Tensor]:
        """List the state."""
        return (self.state,)

    def initialise(self) -> None:
        """Begin a run."""
        self.state.copy_(torch.tensor([INITIAL_SCALE, 0.0]))

    def begin(self) -> None:
        """Begin a step, from the state of the last one."""
        scale, steps = self.state.tolist()
        self._scale, self._steps = scale, int(steps)

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        return self._scale

    def fits(self, norm: Tensor | float) -> bool:
        """Return whether gradients of this norm can be used; if not, halve the scale for another try.

        Below a scale of 1 not the format overflows but the training: its norm is reported as it is.
        """
        if math.isfinite(norm) or self._scale <= 1.0:
            self._steps += 1
            return True
        self._scale, self._steps = self._scale / 2.0, 0
        return False

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self._scale)

    def step(self) -> None:
        """Write the scale into the state, doubled if it has held for long enough."""
        if self._steps >= GROWTH_STEPS:
            self._scale, self._steps = self._scale * 2.0, 0
        self.state.copy_(torch.tensor([self._scale, float(self._steps)]))


def loss_scaling(precision: str, device: torch.device) -> Scaling:
    """Return the scaling that a precision needs."""
    return LossScaler(device) if precision == "fp16" else NoScaling()
