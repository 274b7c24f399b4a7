"""Modules of Gemma 3."""

from __future__ import annotations

from functools import partial

from picotron_ray.config.schema.model import ModelConfig, RopeScaling
from picotron_ray.models.decoder.windows import sees_whole_row
from picotron_ray.models.layers.attention import Attention, AttentionKernel, query_times
from picotron_ray.models.layers.block import BothNormsBlock
from picotron_ray.models.layers.pointwise import gelu_gate
from picotron_ray.models.layers.rms_norm import OffsetRMSNorm
from picotron_ray.models.layers.rope import Rope, model_rope, rope_of
from picotron_ray.models.layers.swiglu import SwiGLU


def norm(config: ModelConfig) -> OffsetRMSNorm:
    """The norm over the residual stream."""
    return OffsetRMSNorm(config.hidden_size, config.norm_eps)


def rope(config: ModelConfig, layer: int) -> Rope:
    """Rotary positions of a block: stretched where it sees whole rows, with a base of its own elsewhere.

    Both are one object in a process, so that all blocks of a kind are one compiled graph.
    """
    if sees_whole_row(config, layer):
        return model_rope(config)
    return rope_of(config.rope_local_theta or config.rope_theta, RopeScaling())


def block(config: ModelConfig, kernel: AttentionKernel, layer: int = 0) -> BothNormsBlock:
    """One block, by its absolute number."""
    attention = Attention(
        config,
        kernel,
        rope=rope(config, layer),
        q_norm=OffsetRMSNorm(config.head_size, config.norm_eps),
        k_norm=OffsetRMSNorm(config.head_size, config.norm_eps),
        whole=sees_whole_row(config, layer),
        query_times=query_times(config),
    )
    mlp = SwiGLU(config.hidden_size, config.intermediate_size, gelu_gate)
    return BothNormsBlock(partial(norm, config), attention, mlp)
