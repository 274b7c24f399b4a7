"""Gemma 2 and 3 in configs: what the families take and refuse, and config.json both ways."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.support.kernels import attention_backends
from picotron_ray.errors import ConfigError
from picotron_ray.models.decoder.windows import sees_whole_row
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.huggingface.config import model_keys
from picotron_ray.models.huggingface.names import architecture_of, hf_config, tensors

HF2 = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4}
HF3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 4}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"sliding_window": 8, "full_attention_every": 2}
GEMMA2 = {"family": "gemma2", **WINDOWS, "attention_softcap": 50.0, "logit_softcap": 30.0}
GEMMA3 = {"family": "gemma3", **WINDOWS, "rope_local_theta": 10000.0}


@pytest.mark.parametrize(
    ("model", "key", "text"),
    [
        (
            {**GEMMA2, "qk_norm": True},
            "model.qk_norm",
            "saw a value with model.family=gemma2, which has none",
        ),
        (
            {**GEMMA2, "rope_local_theta": 5.0},
            "model.rope_local_theta",
            "model.family=gemma2, which has none",
        ),
        ({**GEMMA2, "partial_rotary_factor": 0.5}, "model.partial_rotary_factor", "gemma2, which has none"),
        ({**GEMMA2, "moe": {"experts": 4}}, "model.moe", "saw a value with model.family=gemma2"),
        (
            {**GEMMA2, "max_positions": 9},
            "model.max_positions",
            "model.family=gemma2, whose positions are ro",
        ),
        (
            {"family": "gemma2", "full_attention_every": 2},
            "model.full_attention_every",
            "saw 2 without model.sliding_window, so that every block sees whole rows; drop it",
        ),
        (
            {**GEMMA2, "full_attention_every": 1},
            "model.full_attention_every",
            "saw 1, expected an integer >= 2",
        ),
        ({**GEMMA2, "attention_softcap": 0}, "model.attention_softcap", "saw 0, expected a number > 0"),
        ({**GEMMA3, "qk_norm": True}, "model.qk_norm", "model.family=gemma3, which norms q and k anyway"),
        (
            {**GEMMA3, "attention_softcap": 5.0},
            "model.attention_softcap",
            "model.family=gemma3, which has none",
        ),
        (
            {"family": "gemma3", **WINDOWS},
            "model.rope_local_theta",
            "saw nothing with model.sliding_window, expected the rotary base of blocks with a window",
        ),
        (
            {"family": "gemma3", "rope_local_theta": 9.0},
            "model.rope_local_theta",
            "saw 9 without model.sliding_window, so that no block has it; drop it",
        ),
        *(
            (
                {"family": family, "kv_heads": 4, key: value},
                f"model.{key}",
                f"{family}, which has none; drop it",
            )
            for family in ("llama", "olmo2")
            for key, value in {
                "full_attention_every": 2,
                "query_pre_attn_scalar": 16,
                "attention_softcap": 50.0,
                "logit_softcap": 30.0,
                "rope_local_theta": 10000.0,
            }.items()
        ),
    ],
)
def test_a_key_that_does_not_fit_is_refused_in_one_line(model: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"model": model})
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: ")
    assert text in line


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_a_kernel_that_caps_no_scores_is_refused_by_name(kernel: str, device: str) -> None:
    """And `auto` takes the formulas, which cap."""
    said: dict[str, Any] = {"model": GEMMA2, "cluster": {"device": device}, "precision": "bf16"}
    assert attention_backends(parse_job(said), device)[0] == "math"
    parse_job({**said, "kernels": {"attention": "math"}})
    with pytest.raises(ConfigError) as caught:
        parse_job({**said, "kernels": {"attention": kernel}})
    (line,) = caught.value.problems
    assert line.startswith(f"kernels.attention: saw {kernel}, expected auto or one of math")
    assert f" on {device} with precision bf16" in line
    assert line.endswith(" and scores that are capped")


def test_windows_of_some_blocks_leave_the_kernels_that_know_windows() -> None:
    job = parse_job({"model": GEMMA3, "precision": "bf16", "cluster": {"device": "cuda"}})
    assert attention_backends(job, "cuda") == ["flash", "flash-attn", "efficient", "math"]
    parse_job({"model": GEMMA3, "layout": {"cp": 2}})
    text = "kernels.norm: saw compiled with model.family=gemma3, which has no norm of a residual sum"
    with pytest.raises(ConfigError, match=text):
        parse_job({"model": GEMMA3, "kernels": {"norm": "compiled"}})


def test_every_so_many_blocks_one_sees_whole_rows() -> None:
    model = ModelConfig(**GEMMA2, layers=7)
    assert [sees_whole_row(model, layer) for layer in range(4)] == [False, True, False, True]
    third = model.model_copy(update={"full_attention_every": 3})
    assert [layer for layer in range(7) if sees_whole_row(third, layer)] == [2, 5]
    none = model.model_copy(update={"full_attention_every": None})
    assert not any(sees_whole_row(none, layer) for layer in range(7))
    assert sees_whole_row(model.model_copy(update={"sliding_window": None}), 0)


@pytest.mark.parametrize(
    ("said", "window", "every"),
    [
        (HF2, 4096, 2),
        (HF3, 4096, None),  # each sixth of four
        ({**HF3, "sliding_window_pattern": 3}, 4096, 3),
        ({**HF3, "sliding_window_pattern": 1}, None, None),
        ({**HF2, "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 9}, 9, 4),
        ({**HF2, "layer_types": [FULL] * 4}, None, None),
        ({**HF2, "layer_types": [SLIDING] * 4}, 4096, None),
    ],
)
def test_kinds_of_blocks_are_read(said: dict[str, Any], window: int | None, every: int | None) -> None:
    found = model_keys(said)
    assert (found.get("sliding_window"), found.get("full_attention_every")) == (window, every)
    assert ("rope_local_theta" in found) == (found["family"] == "gemma3" and window is not None)


@pytest.mark.parametrize(
    ("base", "change", "text"),
    [
        (HF2, {"hidden_activation": "gelu"}, "hidden_activation: saw 'gelu', expected 'gelu_pytorch_tanh'"),
        (HF2, {"use_bidirectional_attention": True}, "use_bidirectional_attention: saw True, expected False"),
        (
            HF2,
            {"layer_types": [FULL, SLIDING, FULL, SLIDING]},
            f"layer_types.1: saw {SLIDING}, expected {FULL}",
        ),
        (
            HF2,
            {"layer_types": [SLIDING, FULL, FULL, FULL]},
            f"layer_types.2: saw {FULL}, expected {SLIDING}: on",
        ),
        (HF2, {"layer_types": [SLIDING, "chunked", SLIDING, FULL]}, "layer_types.1: saw chunked, expected"),
        (HF2, {"layer_types": [SLIDING]}, f"layer_types: saw .*, expected a list of 4 times {SLIDING} or"),
        (HF2, {"sliding_window": None}, "sliding_window: saw null, expected a whole number"),
        (HF2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping: saw 0, expected a number above 0"),
        (HF2, {"query_pre_attn_scalar": 2.5}, "query_pre_attn_scalar: saw 2.5, expected a whole number"),
        (HF3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: saw 50.0, expected None"),
        (HF3, {"model_type": "gemma3"}, "model_type: saw gemma3, expected gemma3_text with"),
        (
            HF3,
            {"rope_parameters": {"rope_theta": 5.0}},
            "rope_parameters.rope_theta: saw 5.0, expected an obj",
        ),
        (HF3, {"rope_parameters": 5}, "rope_parameters: saw 5, expected an object"),
        (
            HF3,
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}},
            f"rope_parameters.{SLIDING}.rope_type: saw linear, expected default: a window is not stretched",
        ),
        (HF3, {"rope_parameters": {FULL: {"rope_type": "su"}}}, "rope_type: saw su, expected one of default"),
        (
            HF3,
            {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}},
            f"rope_parameters.{FULL}.partial_rotary_factor: saw 0.5, expected 1",
        ),
        (
            HF3,
            {"rope_parameters": {FULL: {"rope_theta": "x"}}},
            f"rope_parameters.{FULL}.rope_theta: saw x, exp",
        ),
    ],
)
def test_a_variant_that_is_not_built_is_refused(
    base: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    model_keys(base)
    with pytest.raises(ConfigError, match=f"^config.json: {text}"):
        model_keys({**base, **change})


@pytest.mark.parametrize(
    "model", [GEMMA2, GEMMA3, {**GEMMA3, "logit_softcap": 9.0}], ids=["2", "3", "capped"]
)
def test_what_is_written_is_read_back(model: dict[str, Any]) -> None:
    scaling = {"type": "linear", "factor": 8.0}
    made = ModelConfig(**model, layers=5, query_pre_attn_scalar=16, rope_scaling=scaling, head_dim=24)
    written = hf_config(made, 128, "bfloat16")
    assert written["layer_types"] == [SLIDING, FULL, SLIDING, FULL, SLIDING]
    assert "hidden_act" not in written
    assert ModelConfig.model_validate(model_keys(written)) == made
    plain = ModelConfig(family=model["family"])
    assert hf_config(plain, 128, "float32")["layer_types"] == [FULL] * 4
    assert hf_config(plain, 128, "float32")["query_pre_attn_scalar"] == 32


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_every_parameter_has_a_tensor_of_its_own(family: str) -> None:
    model = ModelConfig.model_validate({"family": family, "layers": 2})
    found = list(tensors(model, architecture_of(model)))
    assert [name for held in found for name in held.ours] == [spec.name for spec in parameter_table(model)]
    names = [name for held in found for name in held.theirs]
    assert len(set(names)) == len(names)
    assert "model.layers.1.pre_feedforward_layernorm.weight" in names
    assert ("model.layers.1.self_attn.q_norm.weight" in names) == (family == "gemma3")


def test_norms_begin_as_zeros_and_never_decay() -> None:
    table = parameter_table(ModelConfig(family="gemma3"))
    norms = [spec for spec in table if "norm" in spec.name]
    assert len(norms) == 6 * 4 + 1
    assert {(spec.init_std, spec.decay, spec.tp_dim) for spec in norms} == {(0.0, False, None)}
