"""The last layer: hidden states to logits over the vocabulary, or to the losses of targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from picotron_ray.models.layers.softcap import softcap

Losses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden states ``[rows, seq, hidden]``, weight, targets ``[rows, seq]``) → losses ``[rows, seq]``."""


class Head(nn.Linear):
    """A linear layer without bias.

    Args:
        cap: of logits (`models.layers.softcap`), which are then fp32 or wider; None: there is none.

    Fields:
        softcap: as above.
        losses: what makes losses from targets without logits of all tokens at once; None: nothing does, and
            targets are not expected.
    """

    def __init__(self, hidden: int, vocabulary: int, cap: float | None = None) -> None:
        super().__init__(hidden, vocabulary, bias=False)
        self.softcap = cap
        self.losses: Losses | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[rows, seq, hidden]`` → logits ``[rows, seq, vocab]``, or the targets' losses ``[rows, seq]``."""
        if targets is None:
            logits = super().forward(x)
            if self.softcap is None:
                return logits
            return softcap(logits.to(torch.promote_types(logits.dtype, torch.float32)), self.softcap)
        assert self.losses is not None, "parallelize says what makes losses of targets"
        return self.losses(x, self.weight, targets)
