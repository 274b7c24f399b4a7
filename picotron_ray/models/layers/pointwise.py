"""Pointwise functions of tensors alone: a residual sum with the norm after it, and gates of hidden layers.

Torch has no operator for them. A compiler can make each one kernel, which all blocks then share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


SHARPNESS, LIMIT = 1.702, 7.0
"""Of the clamped gate: the factor of its sigmoid's argument, and the bound of what goes in."""


class _ClampedGate(torch.autograd.Function):
    """`clamped_gate`, which keeps nothing but its two inputs: autograd would keep six tensors as large."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        opened = gate.clamp(max=LIMIT)
        return opened * torch.sigmoid(SHARPNESS * opened) * (up.clamp(-LIMIT, LIMIT) + 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (gradient,) = gradients
        opened, passed = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        share = torch.sigmoid(SHARPNESS * opened)
        slope = share * (1 + SHARPNESS * opened * (1 - share))
        of_gate = gradient * passed * slope * (gate <= LIMIT)
        return of_gate, gradient * opened * share * (up.abs() <= LIMIT)


def clamped_gate(gate: Tensor, up: Tensor) -> Tensor:
    """``g sigmoid(1.702 g) * (u + 1)``, g at most 7 and u within ±7 (OpenAI 2025, gpt-oss)."""
    found: Tensor = _ClampedGate.apply(gate, up)
    return found
