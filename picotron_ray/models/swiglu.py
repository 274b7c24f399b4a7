"""The gated hidden layer of a block: ``down(silu(gate x) * up x)`` (Shazeer 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """In two halves, so that a mixture of experts can hide communication behind each."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` → ``[..., inner]``: what ``down`` takes."""
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.inner(x))
        return found
