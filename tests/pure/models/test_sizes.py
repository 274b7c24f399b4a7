"""Sizes and tables of the families, number by number, counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from picotron_ray.config.schema.model import ModelConfig, MoeConfig
from picotron_ray.models.decoder.table import tied_copies
from picotron_ray.models.families.registry import family_of, parameter_table
from picotron_ray.models.parameters import ParameterSpec, SequenceShard
from picotron_ray.models.sizes import ModelSizes

SMALL: dict[str, Any] = {"vocab_size": 11, "layers": 3, "intermediate_size": 9, "init_std": 0.5}
WIDTHS: dict[str, Any] = {"hidden_size": 14, "heads": 4, "kv_heads": 2, "head_dim": 5}
MIXTURE = MoeConfig(experts=5, top_k=2, intermediate_size=6, shared_intermediate_size=7, balance="bias")
LLAMA = ModelConfig(**SMALL, **WIDTHS)
OLMO2 = ModelConfig(family="olmo2", **SMALL, **WIDTHS)
MIXED = ModelConfig(**SMALL, **WIDTHS, moe=MIXTURE, tie_embeddings=True)
BOTH = {"sliding_window": 3, "full_attention_every": 2}
GEMMA2 = ModelConfig(family="gemma2", **SMALL, **WIDTHS, **BOTH)
GEMMA3 = ModelConfig(family="gemma3", **SMALL, **WIDTHS, **BOTH, rope_local_theta=100.0)
GPT2 = ModelConfig(family="gpt2", **SMALL, hidden_size=12, heads=4, kv_heads=4, max_positions=8)

SIZES_OF_LLAMA: dict[str, Any] = {
    "layers": 3,
    "hidden": 14,
    "embed": 11 * 14,
    "block": 28 + 280 + 2 * 140 + 280 + 3 * 126,  # norms, q, k and v, output, SwiGLU
    "head": 14 + 154,
    "tied": 0,
    "whole_block": 0,
    "whole_embed": 0,
    "whole_head": 0,
    "activations": 56 + 60 + 36,
    "hidden_layer": 4 * 9,  # gate, up, the activation and the product
    "products": 28 + 60 + 32,
    "at_work": 84 + 9,
    "pointwise": 98 + 60 + 45,
    "sequence_cut": True,
    "vocabulary": 11,
    "scores": 20,
    "matrices": 840 + 378,
    "fused": 14 * (20 + 20 + 18),
    "rms_normed": 28,
}
SIZES = [
    (LLAMA, SIZES_OF_LLAMA),
    (
        OLMO2,
        SIZES_OF_LLAMA
        | {
            "block": 28 + 30 + 840 + 378,
            "activations": 152 + 30,
            "pointwise": 203 + 60,
            "rms_normed": 28 + 30,
        },
    ),
    (
        GEMMA2,
        SIZES_OF_LLAMA
        | {
            "block": 56 + 840 + 378,
            "activations": 152 + 28,  # what attention and SwiGLU give, before its norm
            "pointwise": 203 + 56,
            "rms_normed": 56,
        },
    ),
    (
        GEMMA3,
        SIZES_OF_LLAMA
        | {
            "block": 56 + 10 + 840 + 378,
            "activations": 152 + 28 + 30,
            "pointwise": 203 + 56 + 60,
            "rms_normed": 56 + 30,
        },
    ),
    (
        MIXED,
        SIZES_OF_LLAMA
        | {
            "block": 28 + 840 + 70 + 1260 + 294,  # norms, attention, router, experts, the shared one
            "head": 14,
            "tied": 154,
            "activations": 56 + 60 + 2 * (28 + 24) + 28 + 15,
            "hidden_layer": 2 * (28 + 24) + 28 + 15,
            "products": 28 + 60 + 2 * (14 + 12) + 14 + 5,
            "at_work": 84 + 12,
            "pointwise": 98 + 60 + 2 * (84 + 30) + 35 + 30,
            "matrices": 840 + 70 + 1260 + 294,
            "experts": 1260,
            "idle": 756,
            "routed": 28,
            "fused": 14 * (20 + 20 + 14),
            "fused_experts": 840,
        },
    ),
    (
        GPT2,
        SIZES_OF_LLAMA
        | {
            "hidden": 12,
            "embed": 132 + 96,
            "block": 48 + 3 * 156 + 156 + 117 + 120,
            "head": 24 + 132,
            "whole_embed": 96,
            "activations": 48 + 48 + 18,
            "hidden_layer": 18,
            "products": 24 + 48 + 21,
            "at_work": 72 + 9,
            "pointwise": 84 + 48 + 18,
            "scores": 12,
            "matrices": 4 * 144 + 216,
            "fused": 12 * 36,
            "rms_normed": 0,
        },
    ),
]


@pytest.mark.parametrize(
    ("model", "expected"), SIZES, ids=["llama", "olmo2", "gemma2", "gemma3", "mixture", "gpt2"]
)
def test_sizes_by_hand(model: ModelConfig, expected: dict[str, Any]) -> None:
    assert family_of(model).sizes(model) == ModelSizes(**expected)


OUT = 0.5 / math.sqrt(6)
# name, shape, dimension that tensor parallelism cuts, whether it decays, spread, and what else is true of it
BLOCK_OF_MIXED = [
    ("attention_norm.weight", (14,), None, False, None, {}),
    ("attention.wq.weight", (20, 14), 0, True, 0.5, {}),
    ("attention.wk.weight", (10, 14), 0, True, 0.5, {}),
    ("attention.wv.weight", (10, 14), 0, True, 0.5, {}),
    ("attention.wo.weight", (14, 20), 1, True, OUT, {}),
    ("mlp_norm.weight", (14,), None, False, None, {}),
    ("mlp.router.weight", (5, 14), None, True, 0.5, {}),
    ("mlp.router.bias", (5,), None, False, 0.0, {"trained": False}),
    ("mlp.experts.gate", (5, 6, 14), 1, True, 0.5, {"expert": True}),
    ("mlp.experts.up", (5, 6, 14), 1, True, 0.5, {"expert": True}),
    ("mlp.experts.down", (5, 14, 6), 2, True, OUT, {"expert": True}),
    ("mlp.shared.gate.weight", (7, 14), 0, True, 0.5, {}),
    ("mlp.shared.up.weight", (7, 14), 0, True, 0.5, {}),
    ("mlp.shared.down.weight", (14, 7), 1, True, OUT, {}),
]
BLOCK_OF_GPT2 = [
    ("attention_norm.weight", (12,), None, False, None, {}),
    ("attention_norm.bias", (12,), None, False, 0.0, {}),
    *(
        entry
        for name in ("wq", "wk", "wv")
        for entry in (
            (f"attention.{name}.weight", (12, 12), 0, True, 0.5, {}),
            (f"attention.{name}.bias", (12,), 0, False, 0.0, {}),
        )
    ),
    ("attention.wo.weight", (12, 12), 1, True, OUT, {}),
    ("attention.wo.bias", (12,), None, False, 0.0, {}),
    ("mlp_norm.weight", (12,), None, False, None, {}),
    ("mlp_norm.bias", (12,), None, False, 0.0, {}),
    ("mlp.up.weight", (9, 12), 0, True, 0.5, {}),
    ("mlp.up.bias", (9,), 0, False, 0.0, {}),
    ("mlp.down.weight", (12, 9), 1, True, OUT, {}),
    ("mlp.down.bias", (12,), None, False, 0.0, {}),
]
BLOCK_OF_OLMO2 = [
    *BLOCK_OF_MIXED[1:5],
    ("attention.q_norm.weight", (20,), 0, False, None, {}),
    ("attention.k_norm.weight", (10,), 0, False, None, {}),
    BLOCK_OF_MIXED[0],
    ("mlp.gate.weight", (9, 14), 0, True, 0.5, {}),
    ("mlp.up.weight", (9, 14), 0, True, 0.5, {}),
    ("mlp.down.weight", (14, 9), 1, True, OUT, {}),
    BLOCK_OF_MIXED[5],
]
BLOCK_OF_GEMMA2 = [
    ("attention_norm.weight", (14,), None, False, 0.0, {}),
    *BLOCK_OF_MIXED[1:5],
    ("post_attention_norm.weight", (14,), None, False, 0.0, {}),
    ("mlp_norm.weight", (14,), None, False, 0.0, {}),
    *BLOCK_OF_OLMO2[7:10],
    ("post_mlp_norm.weight", (14,), None, False, 0.0, {}),
]
BLOCK_OF_GEMMA3 = [
    *BLOCK_OF_GEMMA2[:5],
    ("attention.q_norm.weight", (5,), None, False, 0.0, {}),
    ("attention.k_norm.weight", (5,), None, False, 0.0, {}),
    *BLOCK_OF_GEMMA2[5:],
]


def whole(model: ModelConfig, block: list[Any]) -> list[ParameterSpec]:
    """The table of a model with three such blocks."""
    hidden = model.hidden_size
    found = [ParameterSpec("embed.weight", (11, hidden), None, "embed", 0, True, 0.5, embedding=True)]
    if model.max_positions:
        rows = (model.max_positions, hidden)
        found.append(ParameterSpec("positions.weight", rows, None, "embed", None, True, 0.5, embedding=True))
    for layer in range(3):
        for name, shape, tp_dim, decay, std, more in block:
            at = f"layers.{layer}.{name}"
            found.append(ParameterSpec(at, shape, layer, "block", tp_dim, decay, std, **more))
    std = 0.0 if model.family.startswith("gemma") else None
    found.append(ParameterSpec("norm.weight", (hidden,), None, "head", None, False, std))
    if model.family == "gpt2":
        found.append(ParameterSpec("norm.bias", (hidden,), None, "head", None, False, 0.0))
    if not model.tie_embeddings:
        found.append(ParameterSpec("head.weight", (11, hidden), None, "head", 0, True, 0.5))
    return found


@pytest.mark.parametrize(
    ("model", "block"),
    [
        (MIXED, BLOCK_OF_MIXED),
        (GPT2, BLOCK_OF_GPT2),
        (OLMO2, BLOCK_OF_OLMO2),
        (GEMMA2, BLOCK_OF_GEMMA2),
        (GEMMA3, BLOCK_OF_GEMMA3),
    ],
)
def test_tables_by_hand(model: ModelConfig, block: list[Any]) -> None:
    assert list(parameter_table(model)) == whole(model, block)


def test_a_mixture_without_what_it_may_lack() -> None:
    plain = MIXED.model_copy(
        update={"moe": MoeConfig(experts=5, top_k=2, intermediate_size=6, balance="loss")}
    )
    lacking = [
        entry for entry in BLOCK_OF_MIXED if "shared" not in entry[0] and "router.bias" not in entry[0]
    ]
    assert list(parameter_table(plain)) == whole(plain, lacking)


def test_the_copy_of_a_tied_embedding() -> None:
    copy = ParameterSpec("embed.weight", (11, 14), None, "head", 0, True, 0.5, embedding=True, copy=True)
    assert tied_copies(MIXED, parameter_table(MIXED)) == {"head.weight": copy}
    assert tied_copies(LLAMA, parameter_table(LLAMA)) == {}


def test_what_muon_is_for() -> None:
    matrices = {spec.name for spec in parameter_table(MIXED) if spec.matrix}
    names = {name for name, shape, *_ in BLOCK_OF_MIXED if len(shape) > 1}
    assert matrices == {f"layers.{layer}.{name}" for layer in range(3) for name in names}
    stack = ParameterSpec("x", (5, 6, 14), 0, "block", 1, True, 0.5)
    assert not stack.matrix, "three dimensions are a matrix of experts alone"
    assert stack.numel == 420


def test_tokens_of_context_parallel_ranks() -> None:
    assert SequenceShard(5).positions() == (0, 1, 2, 3, 4)
    found = [SequenceShard(12, 3, index).positions() for index in range(3)]
    assert found == [(0, 1, 10, 11), (2, 3, 8, 9), (4, 5, 6, 7)]
    assert SequenceShard(24, 4, 1).positions() == (3, 4, 5, 18, 19, 20)
