"""Modules of a Llama-style decoder.

Sources: Touvron et al. 2023 (Llama), Jiang et al. 2023 (Mistral's window), Yang et al. 2024 and 2025 (Qwen2,
Qwen3), Shazeer 2020 (SwiGLU), Zhang & Sennrich 2019 (RMSNorm).
"""

from __future__ import annotations

from torch import nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.layers.attention import Attention, AttentionKernel
from picotron_ray.models.layers.block import PreNormBlock
from picotron_ray.models.layers.moe import MixtureOfExperts
from picotron_ray.models.layers.rms_norm import RMSNorm
from picotron_ray.models.layers.rope import rope_of
from picotron_ray.models.layers.swiglu import SwiGLU


def norm(config: ModelConfig) -> RMSNorm:
    """The norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps)


def _hidden_layer(config: ModelConfig) -> nn.Module:
    if config.moe.experts:
        return MixtureOfExperts(config.moe, config.hidden_size)
    return SwiGLU(config.hidden_size, config.intermediate_size)


def block(config: ModelConfig, kernel: AttentionKernel, layer: int = 0) -> PreNormBlock:
    """One block; all layers are alike."""

    def head_norm() -> RMSNorm | None:
        return RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None

    attention = Attention(
        config,
        kernel,
        rope=rope_of(config.rope_theta, config.rope_scaling),
        biased=config.qkv_bias,
        q_norm=head_norm(),
        k_norm=head_norm(),
    )
    return PreNormBlock(norm(config), attention, norm(config), _hidden_layer(config))
