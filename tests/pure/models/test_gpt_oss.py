"""gpt-oss in configs: what the family takes and refuses, config.json both ways, values in MXFP4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.support.kernels import attention_backends, attention_masks
from picotron_ray.errors import ConfigError
from picotron_ray.models.families.registry import family_of, parameter_table
from picotron_ray.models.huggingface.config import model_keys
from picotron_ray.models.huggingface.names import hf_config, tensors
from picotron_ray.runtime.run_storage.hf_arrays import their_shapes, unpacked

MOE = {"experts": 4, "intermediate_size": 64}
GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss",
    "sliding_window": 8,
    "full_attention_every": 2,
    "moe": MOE,
}
PUBLISHED: dict[str, Any] = {  # config.json of gpt-oss-20b, what ours reads of it
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"moe": {}}, "model.moe.experts", "saw 0 with model.family=gpt_oss, expected the number of its"),
        ({"qkv_bias": True}, "model.qkv_bias", "model.family=gpt_oss, which has none; drop it"),
        ({"attention_softcap": 5.0}, "model.attention_softcap", "gpt_oss, which has none; drop it"),
        ({"moe": {**MOE, "router": "sigmoid"}}, "model.moe.router", "saw sigmoid with model.family=gpt_oss"),
        ({"moe": {**MOE, "balance": "bias"}}, "model.moe.balance", "whose router has a trained bias; use"),
        ({"moe": {**MOE, "shared_intermediate_size": 8}}, "model.moe.shared_intermediate_size", "has none"),
        ({"sliding_window": None}, "model.full_attention_every", "saw 2 without model.sliding_window"),
        ({"max_positions": 9}, "model.max_positions", "whose positions are rotary; drop it"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_in_one_line(changes: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"model": {**GPT_OSS, **changes}})
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: ")
    assert text in line


def test_a_kernel_that_has_no_sinks_is_refused_by_name() -> None:
    """Also where no token's window is shorter than its row, so that only the sinks are in the way."""
    said: dict[str, Any] = {
        "model": {**GPT_OSS, "head_dim": 64, "sliding_window": 100_000},
        "cluster": {"device": "cuda"},
        "precision": "bf16",
    }
    assert attention_backends(parse_job(said), "cuda") == ["flash", "flash-attn", "efficient", "math"]
    assert attention_backends(parse_job(said), "cuda", hopper=True)[0] == "flash"
    with pytest.raises(ConfigError) as caught:
        parse_job({**said, "kernels": {"attention": "cudnn"}})
    (line,) = caught.value.problems
    assert line.startswith(
        "kernels.attention: saw cudnn, expected auto or one of flash, flash-attn, efficient"
    )
    assert line.endswith(" and attention sinks")
    plain = {**said, "model": {"family": "llama", "sliding_window": 100_000, "head_dim": 64}}
    assert parse_job({**plain, "kernels": {"attention": "cudnn"}}).kernels.attention == "cudnn"


def test_masks_are_made_as_they_are_used() -> None:
    assert not attention_masks(parse_job({"model": GPT_OSS, "cluster": {"device": "cpu"}}), 1)


def test_the_published_config_is_the_recipe() -> None:
    from picotron_ray.config.load import load_job

    model = ModelConfig.model_validate(model_keys(PUBLISHED))
    recipe = load_job("gpt-oss-20b", ["data.path=/corpus"]).model
    of_training = {"moe": recipe.moe, "intermediate_size": recipe.intermediate_size}
    assert model.moe.model_copy(update={"loss_coefficient": recipe.moe.loss_coefficient}) == recipe.moe
    assert model.model_copy(update=of_training) == recipe


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: saw .*, expected none, or"),
        ({"attention_bias": False}, "attention_bias: saw False, expected True"),
        ({"swiglu_limit": 6.0}, "swiglu_limit: saw 6.0, expected 7.0"),
        ({"hidden_act": "gelu"}, "hidden_act: saw 'gelu', expected 'silu'"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types.1: saw sliding_att"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        model_keys({**PUBLISHED, **changes})


def test_config_json_comes_back() -> None:
    model = ModelConfig.model_validate(model_keys(PUBLISHED))
    again = {**hf_config(model, 4096, "bfloat16", PUBLISHED)}
    assert "quantization_config" not in again
    assert model_keys(again) == model_keys(PUBLISHED)
    unsaid = {key: value for key, value in PUBLISHED.items() if key != "rope_scaling"}
    assert model_keys(unsaid) == model_keys(PUBLISHED)


def test_packed_experts_are_two_tensors() -> None:
    model = ModelConfig(**{**GPT_OSS, "layers": 2, "hidden_size": 128})
    shapes = {spec.name: spec.shape for spec in parameter_table(model)}
    at = "model.layers.0.mlp.experts"
    packed = [f"{at}.{name}_proj_blocks" for name in ("gate_up", "down")]
    found = {
        name: shape
        for held in tensors(model, "GptOssForCausalLM", packed)
        for name, shape in zip(held.theirs, their_shapes(held, shapes), strict=True)
    }
    assert found[f"{at}.gate_up_proj_blocks"] == (4, 128, 4, 16)
    assert found[f"{at}.gate_up_proj_scales"] == (4, 128, 4)
    assert found[f"{at}.down_proj_blocks"] == (4, 128, 2, 16)
    assert found[f"{at}.gate_up_proj_bias"] == (4, 128)
    assert found["model.layers.1.mlp.experts.gate_up_proj"] == (4, 128, 128)
    assert found["model.layers.1.mlp.experts.down_proj"] == (4, 64, 128)
    every = [name for held in tensors(model, "GptOssForCausalLM", packed) for name in held.ours]
    assert sorted(every) == sorted(shapes)


def test_values_in_mxfp4() -> None:
    """The lower half of a byte first; each code, its sign, and scales up to the ends of their range."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scales = np.array([[127, 128, 126, *[127] * 10, 0, 254, 255]], np.uint8)
    found = unpacked(codes, scales, "float64")
    assert found.shape == (1, 512)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = [sign * value for sign in (1, -1) for value in values]
    assert list(found[0, :32:2]) == expected
    assert list(found[0, 1:32:2]) == [0.0] * 16
    assert found[0, 33] == 0.5 * 2  # the upper half of byte 0x10, times 2
    assert found[0, 65] == 1.0 * 0.5
    assert found[0, 32 * 13 + 2] == 1.0 * 2.0**-128 * 2 * 0.5
    assert np.isnan(found[0, 32 * 15 :]).all()
    assert not np.isnan(found[0, : 32 * 15]).any()


def test_a_token_goes_through_its_experts_alone() -> None:
    """Sizes by hand: biases and sinks are parameters, not products."""
    model = ModelConfig(
        **{**GPT_OSS, "vocab_size": 11, "hidden_size": 16, "heads": 4, "kv_heads": 2, "layers": 2}
    )
    sizes = family_of(model).sizes(model)
    attention = 16 * (16 + 8 + 8) + 32 + 16 * 16 + 16 + 4
    experts = 4 * (3 * 16 * 64 + 2 * 64 + 16)
    assert sizes.block == 32 + attention + 4 * 16 + 4 + experts
    assert sizes.experts == experts
    assert sizes.idle == experts // 2
    assert sizes.matrices == 16 * 32 + 256 + 64 + 4 * 3 * 16 * 64
    assert sizes.fused_experts == 4 * 2 * 16 * 64
    assert sizes.parameters == sum(spec.numel for spec in parameter_table(model))
    assert sizes.activations == 4 * 16 + 2 * 16 + 2 * 8 + 2 * (2 * 16 + 3 * 64) + 3 * 4
