"""Sizes of DeepSeek-V2 and V3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from picotron_ray.models.decoder.sizes import (
    AttentionSizes,
    decoder_sizes,
    mixture_sizes,
    swiglu_sizes,
)
from picotron_ray.models.families.deepseek.table import block, parameter_table
from picotron_ray.models.sizes import BlockProduct, ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def latent_sizes(model: ModelConfig) -> AttentionSizes:
    """Sizes of a block with two norms and latent attention, values as wide as keys for the kernel."""
    mla, hidden, heads = model.mla, model.hidden_size, model.query_width
    rank = mla.q_lora_rank or 0
    gives = mla.kv_lora_rank + mla.qk_rope_head_dim
    values = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return AttentionSizes(
        # Block input, two norm outputs and the residual between; q, k, v and what attention gives; latent
        # vectors before and after their norms.
        activations=4 * hidden + 4 * heads + 2 * mla.kv_lora_rank + 2 * rank,
        # Block input and what the output projection gives, results of the projections and of attention.
        products=2 * hidden + 2 * heads + gives + values + rank,
        # Two norms and the residual sum as of other decoders; norms of latent vectors; positions turn a part
        # of q and one key; q and k are put together, and v is made wider.
        pointwise=7 * hidden + 6 * heads + 2 * mla.kv_lora_rank + 2 * rank + values,
    )


def sizes(model: ModelConfig) -> ModelSizes:
    """Sizes by which layouts are judged: of blocks with mixtures, and parameters of the dense ones before."""
    mla, first = model.mla, model.moe.first_dense_layers if model.moe.experts else 0
    alike = model.model_copy(
        update={"layers": 1, "moe": model.moe.model_copy(update={"first_dense_layers": 0})}
    )
    hidden_layer = mixture_sizes(model) if model.moe.experts else swiglu_sizes(model)
    found = decoder_sizes(
        model,
        parameter_table(alike),
        latent_sizes(model),
        hidden_layer,
        rms_normed=2 * model.hidden_size + mla.kv_lora_rank + (mla.q_lora_rank or 0),
    )
    dense = [spec for spec in block(model, 0) if first]
    into = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
    return replace(
        found,
        first=first,
        first_block=sum(spec.numel for spec in dense),
        first_matrices=sum(spec.numel for spec in dense if len(spec.shape) > 1),
        whole_block=model.hidden_size * into,
        # Zeros behind narrower values are no work of the model's.
        scores=model.heads * (mla.head_size + mla.v_head_dim) // 2,
        fused=model.hidden_size * (_first_out(model) + hidden_layer.fused),
        block_products=(*_products(model), *found.block_products[2:]),
    )


def _first_out(model: ModelConfig) -> int:
    """Outputs of the two projections of a block's input, which can be one product."""
    mla = model.mla
    return (mla.q_lora_rank or model.query_width) + mla.kv_lora_rank + mla.qk_rope_head_dim


def _products(model: ModelConfig) -> tuple[BlockProduct, ...]:
    """Matrix products of attention; those into latent vectors as one."""
    mla, hidden = model.mla, model.hidden_size
    values = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (
        BlockProduct(mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0), hidden, "whole"),
        BlockProduct(model.query_width, mla.q_lora_rank or hidden, "out"),
        BlockProduct(values, mla.kv_lora_rank, "out"),
        BlockProduct(hidden, model.value_width, "into"),
    )
