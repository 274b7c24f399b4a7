"""Pointwise functions of tensors alone: a residual sum with the norm after it, and gates of hidden layers.

Torch has no operator for them. A compiler can make each one kernel, which all blocks then share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

AddedNorm = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
Gate = Callable[[Tensor, Tensor], Tensor]


def added_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of ``x`` and ``y [..., hidden]``, and its norm: with a bias LayerNorm, else RMSNorm."""
    total = x + y
    if bias is None:
        return total, F.rms_norm(total, list(weight.shape), weight, eps)
    return total, F.layer_norm(total, list(weight.shape), weight, bias, eps)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020)."""
    return F.silu(gate) * up


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` (GeGLU, Shazeer 2020), the tanh form of GELU (Hendrycks & Gimpel 2016)."""
    return F.gelu(gate, approximate="tanh") * up
