"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, Mixed Precision Training, section 3.2).

Small gradients vanish in fp16, so the loss is multiplied before the backward pass and the gradients divided
after it. Where one overflows, the usual loop drops the batch. Here the same batch is computed again with
half the scale: no sample is skipped, and the ledger stays what it is. The scale is part of the training
state, so a run that is restored goes on with the one it had.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


class LossScaler:
    """The scale, and how long it has held. All ranks see the same norms and so keep the same scale.

    Fields:
        state: ``[2]``, fp32: scale, and steps since it last changed. The same storage for good.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.zeros(2, device=device)
        self._scale, self._steps = math.nan, 0  # until a step begins: a loss without it must not look right

    def initialise(self) -> None:
        """Begin a run."""
        self.state.copy_(torch.tensor([INITIAL_SCALE, 0.0]))

    def begin(self) -> None:
        """A step begins, from the state of the last one."""
        scale, steps = self.state.tolist()
        self._scale, self._steps = scale, int(steps)

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        return self._scale

    def fits(self, norm: float) -> bool:
        """Whether gradients of this norm can be used; if not, the scale is halved for another try.

        Below a scale of 1 not the format overflows but the training: its norm is reported as it is.
        """
        if math.isfinite(norm) or self._scale <= 1.0:
            self._steps += 1
            return True
        self._scale, self._steps = self._scale / 2.0, 0
        return False

    def unscale_(self, gradients: list[Tensor]) -> None:
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self._scale)

    def step(self) -> None:
        """Write what the step came to into the state: with the weights, not before."""
        if self._steps >= GROWTH_STEPS:
            self._scale, self._steps = self._scale * 2.0, 0
        self.state.copy_(torch.tensor([self._scale, float(self._steps)]))
