"""Modules of gpt-oss.

Sources: OpenAI 2025 (gpt-oss model card, section 2, and its published code).
"""

from __future__ import annotations

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.decoder.windows import sees_whole_row
from picotron_ray.models.layers.attention import AttentionKernel, SinkAttention
from picotron_ray.models.layers.block import PreNormBlock
from picotron_ray.models.layers.moe import MixtureOfExperts
from picotron_ray.models.layers.pointwise import clamped_gate
from picotron_ray.models.layers.rms_norm import RMSNorm
from picotron_ray.models.layers.rope import model_rope


def norm(config: ModelConfig) -> RMSNorm:
    """The norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps)


def block(config: ModelConfig, kernel: AttentionKernel, layer: int = 0) -> PreNormBlock:
    """One block, by its absolute number; ``kernel`` takes sinks."""
    attention = SinkAttention(
        config,
        kernel,
        rope=model_rope(config),
        biased=True,
        out_biased=True,
        whole=sees_whole_row(config, layer),
    )
    mixture = MixtureOfExperts(config.moe, config.hidden_size, biased=True, activation=clamped_gate)
    return PreNormBlock(norm(config), attention, norm(config), mixture)
