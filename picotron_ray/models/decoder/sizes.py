"""Sizes of decoders: parameters counted in the table, activations by shared formulas. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.models.sizes import BlockProduct, ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


@dataclass(frozen=True, slots=True)
class HiddenLayerSizes:
    """Elements per token of a block's hidden layer.

    Fields:
        activations: what it keeps for backward.
        products: of those, what matrix products gave.
        pointwise: what its other operations read and write.
        inner: width of what a token goes through.
        fused: width of the projections that can be one product, experts aside.
    """

    activations: int
    products: int
    pointwise: int
    inner: int
    fused: int


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Elements per token of a block outside its hidden layer; fields as of `ModelSizes`."""

    activations: int
    products: int
    pointwise: int


def attention_sizes(model: ModelConfig) -> AttentionSizes:
    """Sizes of a block with two norms, grouped queries and a residual stream."""
    hidden, heads = model.hidden_size, 2 * model.query_width + 2 * model.key_width
    return AttentionSizes(
        # Block input, two norm outputs and the residual between, q, attention output, k and v; attention
        # scores are not kept (SDPA recomputes them).
        activations=4 * hidden + heads,
        # Block input and what the output projection gives, q, attention output, k and v.
        products=2 * hidden + heads,
        # Two norms read and write, the residual sum reads twice; positions turn q and k.
        pointwise=7 * hidden + heads,
    )


def swiglu_sizes(model: ModelConfig) -> HiddenLayerSizes:
    """Sizes of a dense SwiGLU.

    Gate, up, their activation and product are kept. The activation reads and writes, the product reads twice.
    """
    inner = model.intermediate_size
    return HiddenLayerSizes(4 * inner, 2 * inner + model.hidden_size, 5 * inner, inner, 2 * inner)


def mixture_sizes(model: ModelConfig) -> HiddenLayerSizes:
    """Sizes of a mixture of SwiGLU experts. Each chosen expert's input and output count too.

    Tokens are copied on their way to experts, and results weighted and summed on the way back.
    """
    moe, hidden = model.moe, model.hidden_size
    inner, shared = moe.intermediate_size, moe.shared_intermediate_size
    return HiddenLayerSizes(
        activations=moe.top_k * (2 * hidden + 4 * inner) + 4 * shared + 3 * moe.experts,
        products=moe.top_k * (hidden + 2 * inner) + 2 * shared + moe.experts,
        pointwise=moe.top_k * (6 * hidden + 5 * inner) + 5 * shared + 6 * moe.experts,
        inner=moe.top_k * inner,
        fused=2 * shared,
    )


def decoder_sizes(
    model: ModelConfig,
    table: Iterable[ParameterSpec],
    attention: AttentionSizes,
    hidden_layer: HiddenLayerSizes,
    *,
    rms_normed: int,
) -> ModelSizes:
    """Sizes of a decoder with sequence parallelism.

    Args:
        table: parameters of the model, or of the same with one block. A bias that no gradient moves is not
            counted.
        rms_normed: see `ModelSizes`.
    """
    trained = [spec for spec in table if spec.trained and not spec.layer]  # of the blocks the first
    block = [spec for spec in trained if spec.part == "block"]
    embed = [spec for spec in trained if spec.part == "embed"]
    experts, moe = _count(spec for spec in block if spec.expert), model.moe
    return ModelSizes(
        layers=model.layers,
        hidden=model.hidden_size,
        embed=_count(embed),
        block=_count(block),
        head=_count(spec for spec in trained if spec.part == "head"),
        tied=embed[0].numel if model.tie_embeddings else 0,
        whole_block=0,
        whole_embed=_count(spec for spec in embed if spec.tp_dim is None),
        whole_head=0,
        activations=attention.activations + hidden_layer.activations,
        hidden_layer=hidden_layer.activations,
        products=attention.products + hidden_layer.products,
        # Of the hidden layer one, and a few of the residual stream.
        at_work=6 * model.hidden_size + hidden_layer.inner,
        pointwise=attention.pointwise + hidden_layer.pointwise,
        sequence_cut=True,
        vocabulary=model.vocab_size,
        scores=model.query_width,
        matrices=_count(spec for spec in block if spec.matrix),
        experts=experts,
        idle=experts * (moe.experts - moe.top_k) // max(1, moe.experts),
        routed=moe.top_k * model.hidden_size if moe.experts else 0,
        fused=model.hidden_size * (model.query_width + 2 * model.key_width + hidden_layer.fused),
        fused_experts=_count(spec for spec in block if spec.expert and spec.matrix) * 2 // 3,
        rms_normed=rms_normed,
        block_products=_products(model, hidden_layer),
    )


def both_norms_sizes(
    model: ModelConfig, table: Callable[[ModelConfig], Iterable[ParameterSpec]], *, normed: int
) -> ModelSizes:
    """Sizes of a decoder whose blocks norm before and after attention and SwiGLU.

    Args:
        table: parameters of a model.
        normed: elements per token of q and k that are normed too, of all heads.
    """
    shared, hidden = attention_sizes(model), model.hidden_size
    attention = replace(
        shared,
        activations=shared.activations + 2 * hidden + normed,  # what comes out before its norm
        pointwise=shared.pointwise + 4 * hidden + 2 * normed,
    )
    return decoder_sizes(
        model,
        table(with_one_block(model)),
        attention,
        swiglu_sizes(model),
        rms_normed=4 * hidden + normed,
    )


def _products(model: ModelConfig, hidden_layer: HiddenLayerSizes) -> tuple[BlockProduct, ...]:
    """Matrix products of a block: q, k and v as one, the output projection, and the hidden layer's."""
    hidden, moe, gates = model.hidden_size, model.moe, 2 if hidden_layer.fused or model.moe.experts else 1
    attention = (
        BlockProduct(model.query_width + 2 * model.key_width, hidden, "out"),
        BlockProduct(hidden, model.query_width, "into"),
    )
    if not moe.experts:
        return (*attention, *_hidden_layer(hidden, model.intermediate_size, gates, 1.0, 1))
    routed = _hidden_layer(hidden, moe.intermediate_size, gates, moe.top_k / moe.experts, moe.experts)
    shared = moe.shared_intermediate_size
    return (*attention, *routed, *(_hidden_layer(hidden, shared, gates, 1.0, 1) if shared else ()))


def _hidden_layer(
    hidden: int, inner: int, gates: int, share: float, count: int
) -> tuple[BlockProduct, BlockProduct]:
    return (
        BlockProduct(gates * inner, hidden, "out", share, count),
        BlockProduct(hidden, inner, "into", share, count),
    )


def _count(specs: Iterable[ParameterSpec]) -> int:
    return sum(spec.numel for spec in specs)


def with_one_block(model: ModelConfig) -> ModelConfig:
    """The same model with one block, whose parameters are counted faster."""
    return model.model_copy(update={"layers": 1})
