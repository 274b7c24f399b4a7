"""Modules of Gemma 2."""

from __future__ import annotations

from functools import partial

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.decoder.windows import sees_whole_row
from picotron_ray.models.layers.attention import Attention, AttentionKernel, query_times
from picotron_ray.models.layers.block import BothNormsBlock
from picotron_ray.models.layers.pointwise import gelu_gate
from picotron_ray.models.layers.rms_norm import OffsetRMSNorm
from picotron_ray.models.layers.rope import model_rope
from picotron_ray.models.layers.swiglu import SwiGLU


def norm(config: ModelConfig) -> OffsetRMSNorm:
    """The norm over the residual stream."""
    return OffsetRMSNorm(config.hidden_size, config.norm_eps)


def block(config: ModelConfig, kernel: AttentionKernel, layer: int = 0) -> BothNormsBlock:
    """One block, by its absolute number; ``kernel`` caps scores where the config says so."""
    attention = Attention(
        config,
        kernel,
        rope=model_rope(config),
        whole=sees_whole_row(config, layer),
        query_times=query_times(config),
    )
    mlp = SwiGLU(config.hidden_size, config.intermediate_size, gelu_gate)
    return BothNormsBlock(partial(norm, config), attention, mlp)
