"""DeepSeek in configs: what its family takes and refuses, config.json both ways, its blocks counted."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import family_of, parameter_table
from picotron_ray.models.huggingface.config import model_keys
from picotron_ray.models.huggingface.names import architecture_of, hf_config, ignored, tensors
from picotron_ray.planner.model_sizes import (
    active_parameters,
    parameter_count,
    stage_bounds,
    stage_parameters,
)

MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MOE = {"experts": 8, "top_k": 3, "intermediate_size": 24, "shared_intermediate_size": 48}
GROUPED = {**MOE, "groups": 4, "top_k_groups": 2}
BASE = {"family": "deepseek", "kv_heads": 4, "mla": MLA}
V3_MOE = {**GROUPED, "router": "sigmoid", "balance": "bias", "group_score": "top-2", "first_dense_layers": 1}

# config.json as published, but for YaRN's positions, which are not built for it
LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "aux_loss_alpha": 0.001,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
V3 = {
    **LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
}


def parsed(**model: Any) -> JobConfig:
    return parse_job({"model": {**BASE, **model}})


@pytest.mark.parametrize(
    ("model", "key", "text"),
    [
        ({"mla": {}}, "model.mla.kv_lora_rank", "expected the width of the latent vector"),
        ({"kv_heads": 2}, "model.kv_heads", "saw 2 with model.family=deepseek, expected model.heads=4"),
        ({"mla": {**MLA, "qk_rope_head_dim": 5}}, "model.mla.qk_rope_head_dim", "expected an even number"),
        (
            {"mla": {**MLA, "v_head_dim": 13}},
            "model.mla.v_head_dim",
            "expected at most qk_nope_head_dim + qk_rope",
        ),
        (
            {"mla": {**MLA, "mscale_all_dim": 0.7}},
            "model.mla.mscale_all_dim",
            "saw 0.7 with model.rope_scaling.factor=1, which stretches nothing; drop it",
        ),
        ({"qk_norm": True}, "model.qk_norm", "saw a value with model.family=deepseek, which has none"),
        ({"head_dim": 16}, "model.head_dim", "saw a value with model.family=deepseek, which has none"),
        ({"sliding_window": 8}, "model.sliding_window", "saw a value with model.family=deepseek"),
        ({"max_positions": 128}, "model.max_positions", "model.family=deepseek, whose positions are rotary"),
        (
            {"moe": {**MOE, "first_dense_layers": 4}},
            "model.moe.first_dense_layers",
            "saw 4, expected fewer than model.layers=4; without mixtures say experts=0",
        ),
        (
            {"moe": {"first_dense_layers": 1}},
            "model.moe.first_dense_layers",
            "model.moe.experts=0, a dense model",
        ),
        (
            {"moe": {**MOE, "groups": 3}},
            "model.moe.groups",
            "saw 3, which does not divide model.moe.experts=8",
        ),
        (
            {"moe": {**GROUPED, "top_k_groups": 5}},
            "model.moe.top_k_groups",
            "saw 5, expected at most model.moe",
        ),
        (
            {"moe": {**GROUPED, "top_k_groups": 1}},
            "model.moe.top_k",
            "saw 3, expected at most 2: top_k_groups=1 of 2 experts each",
        ),
        ({"moe": {**MOE, "top_k_groups": 2}}, "model.moe.top_k_groups", "with model.moe.groups=1, of which"),
        (
            {"moe": {**MOE, "groups": 8, "top_k_groups": 4, "group_score": "top-2"}},
            "model.moe.group_score",
            "saw top-2 with model.moe.groups=8 of one expert each",
        ),
        (
            {"family": "llama", "kv_heads": 2},
            "model.mla",
            "saw a value with model.family=llama, which has none",
        ),
        (
            {"family": "llama", "mla": {}, "moe": {**MOE, "first_dense_layers": 1}},
            "model.moe.first_dense_layers",
            "saw 1 with model.family=llama, whose blocks are alike",
        ),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(model: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**model)
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: ")
    assert text in line


@pytest.mark.parametrize("config", [LITE, V3], ids=["lite", "v3"])
def test_a_config_json_goes_there_and_back(config: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(model_keys(config))
    written = hf_config(model, 163840, "bfloat16")
    left_out = {"aux_loss_alpha"} if model.moe.router == "sigmoid" else set()
    assert {key: written[key] for key in config if key not in left_out} == {
        key: value for key, value in config.items() if key not in left_out
    }
    assert model_keys(written) == model_keys(config)


def test_the_published_models_have_their_parameters() -> None:
    """15.7 billion, 2.4 without embeddings at work (DeepSeek-V2-Lite); 671 billion, 37 at work (V3)."""
    lite, v3 = (ModelConfig.model_validate(model_keys(config)) for config in (LITE, V3))
    assert parameter_count(lite) == 15_706_484_224
    assert parameter_count(v3) == 671_026_404_352
    assert active_parameters(v3) == pytest.approx(37.5e9, rel=0.01)
    embeddings = 2 * lite.vocab_size * lite.hidden_size
    assert active_parameters(lite) - embeddings == pytest.approx(2.25e9, rel=0.02)


@pytest.mark.parametrize(
    ("base", "change", "text"),
    [
        (LITE, {"attention_bias": True}, "attention_bias: saw True, expected False"),
        (LITE, {"norm_topk_prob": True}, "norm_topk_prob: saw True, expected False"),
        (
            LITE,
            {"topk_method": "noaux_tc"},
            "topk_method: saw noaux_tc, expected greedy or group_limited_greedy",
        ),
        (LITE, {"moe_layer_freq": 2}, "moe_layer_freq: saw 2, expected 1"),
        (LITE, {"kv_lora_rank": None}, "kv_lora_rank: saw null, expected a whole number"),
        (LITE, {"first_k_dense_replace": -1}, "first_k_dense_replace: saw -1, expected a whole number"),
        (
            LITE,
            {"topk_method": "group_limited_greedy", "n_group": None},
            "n_group: saw null, expected a whole",
        ),
        (V3, {"rope_interleave": False}, "rope_interleave: saw False, expected True"),
        (V3, {"scoring_func": "softmax"}, "scoring_func: saw 'softmax', expected 'sigmoid'"),
        (V3, {"quantization_config": {"fmt": "e4m3"}}, "quantization_config: saw .*e4m3.*, expected None"),
    ],
)
def test_a_variant_that_is_not_built_is_refused(
    base: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: {text}"):
        model_keys({**base, **change})


@pytest.mark.parametrize(
    ("moe", "text"),
    [
        ({**MOE, "balance": "bias", "normalize": False}, "balance: saw bias, which DeepseekV2ForCausalLM"),
        (MOE, "normalize: saw true, which DeepseekV2ForCausalLM"),
        ({**V3_MOE, "balance": "loss"}, "balance: saw loss, which DeepseekV3ForCausalLM"),
        ({**V3_MOE, "group_score": "max"}, "group_score: saw max, which DeepseekV3ForCausalLM"),
        ({**V3_MOE, "shared_intermediate_size": 0}, "shared_intermediate_size: saw 0, which DeepseekV3"),
        ({**V3_MOE, "shared_intermediate_size": 30}, "shared_intermediate_size: saw 30, which DeepseekV3"),
    ],
)
def test_what_no_architecture_has_is_not_exported(moe: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.moe.{text}"):
        architecture_of(ModelConfig(**BASE, moe=moe))


@pytest.mark.parametrize("key", ["groups", "scaling"])
def test_routing_of_deepseek_in_a_llama_is_not_exported(key: str) -> None:
    moe = {"experts": 8, "groups": 2} if key == "groups" else {"experts": 8, "scaling": 2.0}
    with pytest.raises(ConfigError, match=f"^model.moe.{key}: saw 2.*, which none of Mixtral"):
        architecture_of(ModelConfig(moe=moe))


def test_every_parameter_has_tensors_of_its_own_and_turned_rows_come_back() -> None:
    model = ModelConfig(**{**BASE, "mla": {**MLA, "q_lora_rank": 20}}, layers=3, moe=V3_MOE)
    assert architecture_of(model) == "DeepseekV3ForCausalLM"
    table = {spec.name: spec for spec in parameter_table(model)}
    found = list(tensors(model, architecture_of(model)))
    assert [name for held in found for name in held.ours] == list(table)
    names = [name for held in found for name in held.theirs]
    assert len(set(names)) == len(names)
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    turned = {held.ours[0]: held.rows for held in found if held.rows}
    assert set(turned) == {
        f"layers.{n}.attention.{name}.weight" for n in range(3) for name in ("wq", "wkv_a")
    }
    for name, rows in turned.items():
        assert sorted(rows) == [*range(table[name].shape[0])]
    assert turned["layers.0.attention.wkv_a.weight"][12:] == (12, 14, 13, 15)
    assert turned["layers.0.attention.wq.weight"][20:24] == (20, 22, 21, 23)


def test_tensors_that_predict_further_tokens_are_left_out_of_v3_alone() -> None:
    names = ["model.layers.3.eh_proj.weight", "model.layers.2.mlp.gate.weight", "model.norm.weight"]
    for moe, expected in ((V3_MOE, {names[0]}), ({**MOE, "normalize": False}, set())):
        model = ModelConfig(**BASE, layers=3, moe=moe)
        assert ignored(model, names) & set(names) == expected


def test_first_dense_blocks_count_as_themselves() -> None:
    model = ModelConfig(**BASE, layers=5, moe={**V3_MOE, "first_dense_layers": 2})
    per_layer = [
        sum(spec.numel for spec in parameter_table(model) if spec.layer == layer and spec.trained)
        for layer in range(5)
    ]
    sizes = family_of(model).sizes(model)
    assert per_layer == [sizes.first_block] * 2 + [sizes.block] * 3
    for stage, (start, end) in enumerate(stage_bounds(model, 2)):
        ends = sizes.head if stage else sizes.embed
        assert stage_parameters(model, 2, stage) == sum(per_layer[start:end]) + ends
        shared = sum(sizes.experts // 2 for layer in range(start, end) if layer >= 2)
        assert stage_parameters(model, 2, stage, ep=2) == sum(per_layer[start:end]) + ends - shared


def test_layouts_that_do_not_divide_are_refused() -> None:
    job = parsed(moe=V3_MOE, intermediate_size=351)
    (problem,) = layout_problems(job, Layout(tp=2))
    assert problem.text == "saw 2, which does not divide model.intermediate_size=351"
    eight = parsed(moe=MOE).model_copy(update={"precision": "fp8"})
    (problem,) = layout_problems(eight, Layout())
    assert "model.mla.kv_lora_rank: 12" in problem.text
    assert "value heads: 24" in problem.text


def test_kernels_that_mixtures_lack_are_refused_and_others_are_not() -> None:
    for kernels in ({"norm": "compiled"}, {"norm": "closed-form"}, {"projections": "fused"}):
        parse_job({"model": {**BASE, "moe": V3_MOE}, "kernels": kernels})
    parse_job({"model": BASE, "kernels": {"activation": "compiled"}})
    with pytest.raises(ConfigError, match=r"kernels\.activation: saw compiled with model\.moe\.experts=8"):
        parse_job({"model": {**BASE, "moe": V3_MOE}, "kernels": {"activation": "compiled"}})


@pytest.mark.parametrize(("rope", "offered"), [(64, True), (192, False)])
def test_heads_that_are_too_wide_for_a_kernel_are_refused(rope: int, offered: bool) -> None:
    """Heads of 192, as published, are not; those of 320 are."""
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": rope, "v_head_dim": 128}
    config = {
        "model": {**BASE, "mla": mla},
        "precision": "bf16",
        "cluster": {"device": "cuda"},
        "kernels": {"attention": "flash"},
    }
    if offered:
        parse_job(config)
        return
    text = "saw flash, expected auto or one of efficient, math on cuda with precision bf16 and heads of 320"
    with pytest.raises(ConfigError, match=text):
        parse_job(config)


def test_the_recipes_config_is_that_of_the_published_model() -> None:
    model = load_job("deepseek-v2-lite", ["data.path=/corpus"]).model
    assert ModelConfig.model_validate(model_keys(LITE)) == model
