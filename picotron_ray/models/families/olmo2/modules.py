"""Modules of OLMo-2."""

from __future__ import annotations

from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.layers.attention import Attention, AttentionKernel
from picotron_ray.models.layers.rms_norm import RMSNorm
from picotron_ray.models.layers.rope import rope_of
from picotron_ray.models.layers.swiglu import SwiGLU


class WideNormAttention(Attention):
    """Attention whose norms of q and k are over all heads together."""

    def normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """``[batch, seq, local heads x head]`` of q or k → ``[batch, seq, local heads, head]``, normed."""
        assert norm is not None
        return self.split(norm(x))


class PostNormBlock(nn.Module):
    """One block: each half norms its output before it adds to the residual stream."""

    def __init__(self, config: ModelConfig, kernel: AttentionKernel) -> None:
        super().__init__()
        self.attention = WideNormAttention(
            config,
            kernel,
            rope=rope_of(config.rope_theta, config.rope_scaling),
            q_norm=RMSNorm(config.query_width, config.norm_eps),
            k_norm=RMSNorm(config.key_width, config.norm_eps),
        )
        self.attention_norm = norm(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.mlp_norm = norm(config)

    def forward(self, x: Tensor, weights: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """``[batch, seq, hidden]`` → the same; ``weights`` of rows are a mixture's, and of no use here."""
        x = x + self.attention_norm(self.attention(x, documents))
        total: Tensor = x + self.mlp_norm(self.mlp(x))
        return total


def norm(config: ModelConfig) -> RMSNorm:
    """The norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps)


def block(config: ModelConfig, kernel: AttentionKernel, layer: int = 0) -> PostNormBlock:
    """One block; all layers are alike."""
    return PostNormBlock(config, kernel)
