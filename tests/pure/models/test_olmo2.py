"""OLMo-2 in configs: what its family takes and refuses, and config.json both ways."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.huggingface.config import model_keys
from picotron_ray.models.huggingface.names import architecture_of, hf_config, tensors

HF = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


@pytest.mark.parametrize(
    ("model", "key", "text"),
    [
        ({"qk_norm": True}, "model.qk_norm", "norms q and k over their whole width anyway; drop it"),
        ({"qkv_bias": True}, "model.qkv_bias", "saw a value with model.family=olmo2, which has none"),
        ({"head_dim": 16}, "model.head_dim", "saw a value with model.family=olmo2, which has none"),
        ({"sliding_window": 8}, "model.sliding_window", "saw a value with model.family=olmo2"),
        ({"moe": {"experts": 4}}, "model.moe", "saw a value with model.family=olmo2, which has none"),
        ({"max_positions": 128}, "model.max_positions", "model.family=olmo2, whose positions are rotary"),
        ({"hidden_size": 36}, "model.hidden_size", "rotary positions need an even head size"),
    ],
)
def test_a_key_of_other_families_is_refused_in_one_line(model: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"model": {"family": "olmo2", **model}})
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: ")
    assert text in line


def test_a_compiled_norm_is_refused_and_other_kernels_are_not() -> None:
    text = "kernels.norm: saw compiled with model.family=olmo2, which has no norm of a residual sum"
    with pytest.raises(ConfigError, match=text):
        parse_job({"model": {"family": "olmo2"}, "kernels": {"norm": "compiled"}})
    for kernels in ({"norm": "closed-form"}, {"activation": "compiled"}, {"projections": "fused"}):
        parse_job({"model": {"family": "olmo2"}, "kernels": kernels})


def test_the_recipes_config_is_that_of_the_published_model() -> None:
    model = load_job("olmo2-1b", ["data.path=/corpus"]).model
    published = {
        **HF,
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 500000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    assert ModelConfig.model_validate(model_keys(published)) == model
    written = hf_config(model, 4096, "bfloat16")
    assert {key: written[key] for key in published} == published
    assert model_keys(written) == model_keys(published)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attention_bias": True}, "attention_bias: saw True, expected False"),
        ({"hidden_act": "gelu"}, "hidden_act: saw 'gelu', expected 'silu'"),
        ({"model_type": "olmo"}, "model_type: saw olmo, expected olmo2 with Olmo2ForCausalLM"),
    ],
)
def test_a_variant_that_is_not_built_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: {text}"):
        model_keys({**HF, **change})


def test_every_parameter_has_a_tensor_of_its_own() -> None:
    model = ModelConfig(family="olmo2", layers=2)
    found = list(tensors(model, architecture_of(model)))
    assert [name for held in found for name in held.ours] == [spec.name for spec in parameter_table(model)]
    names = [name for held in found for name in held.theirs]
    assert len(set(names)) == len(names)
    assert "model.layers.1.post_feedforward_layernorm.weight" in names


def test_tensor_parallelism_cuts_the_wide_norms_with_their_projections() -> None:
    table = {spec.name: spec for spec in parameter_table(ModelConfig(family="olmo2"))}
    for name, projection in (("q_norm", "wq"), ("k_norm", "wk")):
        norm = table[f"layers.0.attention.{name}.weight"]
        assert norm.shape == table[f"layers.0.attention.{projection}.weight"].shape[:1]
        assert (norm.tp_dim, norm.decay, norm.init_std) == (0, False, None)
