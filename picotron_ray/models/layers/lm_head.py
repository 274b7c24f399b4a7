"""The last layer: hidden states to logits over the vocabulary, or to the losses of targets."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Losses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden states ``[rows, seq, hidden]``, weight, targets ``[rows, seq]``) → losses ``[rows, seq]``."""


class Head(nn.Linear):
    """A linear layer without bias.

    Fields:
        losses: what makes losses from targets without logits of all tokens at once; None: nothing does, and
            targets are not expected.
    """

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__(hidden, vocabulary, bias=False)
        self.losses: Losses | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[rows, seq, hidden]`` → logits ``[rows, seq, vocab]``, or the targets' losses ``[rows, seq]``."""
        if targets is None:
            return super().forward(x)
        assert self.losses is not None, "parallelize says what makes losses of targets"
        return self.losses(x, self.weight, targets)
