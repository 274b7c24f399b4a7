"""The gated hidden layer of a block: ``down(silu(gate x) * up x)``, or GELU's (Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from picotron_ray.models.layers.fused_linear import FusedLinear
from picotron_ray.models.layers.pointwise import Gate, silu_gate


class SwiGLU(nn.Module):
    """In two halves, so that a mixture of experts can hide communication behind each.

    Fields:
        activation: see `models.layers.pointwise`.
        fused_linear: computes gate and up together; None: each computes itself.
    """

    def __init__(self, hidden: int, inner: int, activation: Gate = silu_gate) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.activation = activation
        self.fused_linear: FusedLinear | None = None

    def fuse(self, as_one: bool = True) -> None:
        """Let `fused_linear` compute the projections, as one product or one by one."""
        self.fused_linear = FusedLinear(self.gate, self.up, as_one=as_one)

    def inner(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` → ``[..., inner]``: what ``down`` takes."""
        gate, up = (self.gate(x), self.up(x)) if self.fused_linear is None else self.fused_linear(x)
        return self.activation(gate, up)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.inner(x))
        return found
