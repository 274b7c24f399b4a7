"""Modules of GPT-2."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.layers.attention import Attention, AttentionKernel
from picotron_ray.models.layers.block import PreNormBlock
from picotron_ray.models.layers.fused_linear import FusedLinear


class GeluMlp(nn.Module):
    """``down(gelu(up x))``, the tanh form of GELU (Hendrycks & Gimpel 2016).

    Fields:
        fused_linear: computes ``up``, by other means; None: it computes itself.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.fused_linear: FusedLinear | None = None

    def fuse(self, as_one: bool = False) -> None:
        """Let `fused_linear` compute ``up``, which has nothing to be one product with."""
        self.fused_linear = FusedLinear(self.up, as_one=as_one)

    def forward(self, x: Tensor) -> Tensor:
        (inner,) = (self.up(x),) if self.fused_linear is None else self.fused_linear(x)
        found: Tensor = self.down(F.gelu(inner, approximate="tanh"))
        return found


def norm(config: ModelConfig) -> nn.LayerNorm:
    """The norm over the residual stream (Ba et al. 2016)."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def block(config: ModelConfig, kernel: AttentionKernel, layer: int = 0) -> PreNormBlock:
    """One block; all layers are alike."""
    attention = Attention(config, kernel, biased=True, out_biased=True)
    mlp = GeluMlp(config.hidden_size, config.intermediate_size)
    return PreNormBlock(norm(config), attention, norm(config), mlp)
