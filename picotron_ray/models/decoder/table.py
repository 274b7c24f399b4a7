"""Parameter tables of decoders, from parts that families share. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from picotron_ray.models.parameters import ParameterSpec, Part

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

Specs = list[ParameterSpec]


def matrix(
    name: str,
    shape: tuple[int, int],
    tp_dim: int,
    std: float,
    *,
    layer: int | None = None,
    part: Part = "block",
) -> ParameterSpec:
    """A matrix ``[out, in]`` of which tensor parallelism cuts one dimension."""
    return ParameterSpec(name, shape, layer, part, tp_dim, True, std)


def norm(
    name: str, size: int, *, layer: int | None = None, part: Part = "block", tp_dim: int | None = None
) -> ParameterSpec:
    """The weight of a norm ``[size]``, which begins as ones and is never decayed."""
    return ParameterSpec(name, (size,), layer, part, tp_dim, False, None)


def offset_norm(name: str, size: int, *, layer: int | None = None, part: Part = "block") -> ParameterSpec:
    """The weight of a norm that multiplies by 1 + weight ``[size]``: it begins as zeros."""
    return ParameterSpec(name, (size,), layer, part, None, False, 0.0)


def bias(
    name: str, size: int, tp_dim: int | None, layer: int | None = None, part: Part = "block"
) -> ParameterSpec:
    """A bias ``[size]``, which begins as zeros and is never decayed."""
    return ParameterSpec(name, (size,), layer, part, tp_dim, False, 0.0)


def out_std(config: ModelConfig) -> float:
    """Spread of matrices that write into the residual stream: smaller by sqrt(2 x layers).

    So its variance does not grow with depth (Radford et al. 2019, GPT-2, section 2.3).
    """
    return config.init_std / math.sqrt(2 * config.layers)


def projections(config: ModelConfig, layer: int, *, biased: bool) -> Specs:
    """The q, k and v projections of a block's attention."""
    found: Specs = []
    widths = {"wq": config.query_width, "wk": config.key_width, "wv": config.key_width}
    for name, width in widths.items():
        at = f"layers.{layer}.attention.{name}"
        found.append(matrix(f"{at}.weight", (width, config.hidden_size), 0, config.init_std, layer=layer))
        if biased:
            found.append(bias(f"{at}.bias", width, 0, layer))
    return found


def output_projection(config: ModelConfig, layer: int) -> ParameterSpec:
    """The matrix that brings attention back into the residual stream."""
    shape = (config.hidden_size, config.query_width)
    return matrix(f"layers.{layer}.attention.wo.weight", shape, 1, out_std(config), layer=layer)


def swiglu(config: ModelConfig, layer: int, at: str, inner: int) -> Specs:
    """Gate, up and down of a SwiGLU at the module ``at``."""
    hidden, std = config.hidden_size, config.init_std
    return [
        matrix(f"{at}.gate.weight", (inner, hidden), 0, std, layer=layer),
        matrix(f"{at}.up.weight", (inner, hidden), 0, std, layer=layer),
        matrix(f"{at}.down.weight", (hidden, inner), 1, out_std(config), layer=layer),
    ]


def both_norms_block(config: ModelConfig, layer: int, *, head_norms: bool) -> Specs:
    """A block with offset norms before and after attention and SwiGLU, and if asked of each head of q, k."""
    at, hidden = f"layers.{layer}", config.hidden_size
    of_heads = ("q_norm", "k_norm") if head_norms else ()
    return [
        offset_norm(f"{at}.attention_norm.weight", hidden, layer=layer),
        *projections(config, layer, biased=False),
        output_projection(config, layer),
        *(offset_norm(f"{at}.attention.{name}.weight", config.head_size, layer=layer) for name in of_heads),
        offset_norm(f"{at}.post_attention_norm.weight", hidden, layer=layer),
        offset_norm(f"{at}.mlp_norm.weight", hidden, layer=layer),
        *swiglu(config, layer, f"{at}.mlp", config.intermediate_size),
        offset_norm(f"{at}.post_mlp_norm.weight", hidden, layer=layer),
    ]


def mixture(config: ModelConfig, layer: int, *, biased: bool = False) -> Specs:
    """Router, stacked experts, shared expert; with ``biased`` the first two have biases."""
    moe, hidden, std = config.moe, config.hidden_size, config.init_std
    at, experts, inner = f"layers.{layer}.mlp", moe.experts, moe.intermediate_size

    def stacked(name: str, shape: tuple[int, ...], tp_dim: int, spread: float) -> ParameterSpec:
        return ParameterSpec(f"{at}.experts.{name}", shape, layer, "block", tp_dim, True, spread, expert=True)

    table = [ParameterSpec(f"{at}.router.weight", (experts, hidden), layer, "block", None, True, std)]
    if biased:
        table.append(bias(f"{at}.router.logit_bias", experts, None, layer))
    if moe.balance == "bias":
        table.append(replace(bias(f"{at}.router.bias", experts, None, layer), trained=False))
    table += [
        stacked("gate", (experts, inner, hidden), 1, std),
        stacked("up", (experts, inner, hidden), 1, std),
        stacked("down", (experts, hidden, inner), 2, out_std(config)),
    ]
    if biased:
        widths = {"gate_bias": (inner, 1), "up_bias": (inner, 1), "down_bias": (hidden, None)}
        table += [
            ParameterSpec(
                f"{at}.experts.{name}", (experts, width), layer, "block", cut, False, 0.0, expert=True
            )
            for name, (width, cut) in widths.items()
        ]
    if moe.shared_intermediate_size:
        table += swiglu(config, layer, f"{at}.shared", moe.shared_intermediate_size)
    return table


def decoder_table(
    config: ModelConfig, block: Callable[[ModelConfig, int], Specs], final_norm: Specs
) -> tuple[ParameterSpec, ...]:
    """All parameters of an uncut decoder, in ``named_parameters`` order.

    With tied embeddings there is no ``head.weight``: the head reads ``embed.weight``, or in a pipeline a copy
    of it (`tied_copies`).

    Args:
        block: the parameters of one block, by its absolute number.
        final_norm: those of the norm before the head.
    """
    shape, std = (config.vocab_size, config.hidden_size), config.init_std
    table = [ParameterSpec("embed.weight", shape, None, "embed", 0, True, std, embedding=True)]
    if config.max_positions is not None:
        rows = (config.max_positions, config.hidden_size)
        table.append(ParameterSpec("positions.weight", rows, None, "embed", None, True, std, embedding=True))
    for layer in range(config.layers):
        table += block(config, layer)
    table += final_norm
    if not config.tie_embeddings:
        table.append(matrix("head.weight", shape, 0, std, part="head"))
    return tuple(table)


def tied_copies(config: ModelConfig, table: tuple[ParameterSpec, ...]) -> dict[str, ParameterSpec]:
    """By the module's own name, what a pipeline stage with the head and without the embedding holds of it."""
    if not config.tie_embeddings:
        return {}
    return {"head.weight": replace(table[0], part="head", copy=True)}
