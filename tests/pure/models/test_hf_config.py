"""config.json of a Hugging Face checkpoint: what is taken, refused in one line, and written back."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models.huggingface.config import model_keys
from picotron_ray.models.huggingface.config_reader import show
from picotron_ray.models.huggingface.names import architecture_of, hf_config, ignored, tensors

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2}
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"]}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
FULL, SLIDING = "full_attention", "sliding_attention"

BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"hidden_size": "abc"}, "hidden_size: saw abc, expected a whole number of at least 1"),
    (LLAMA, {"hidden_size": -3}, "hidden_size: saw -3, expected a whole number"),
    (LLAMA, {"hidden_size": 4096.0}, "hidden_size: saw 4096.0, expected a whole number"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers: saw true, expected a whole number"),
    (LLAMA, {"num_attention_heads": None}, "num_attention_heads: saw null, expected a whole number"),
    (LLAMA, {"vocab_size": [1]}, r"vocab_size: saw \[1\], expected a whole number"),
    (LLAMA, {"max_position_embeddings": "long"}, "max_position_embeddings: saw long, expected a whole"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps: saw 1e-5, expected a number above 0"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps: saw 0, expected a number above 0"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps: saw NaN, expected a number above 0"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings: saw yes, expected true or false"),
    (LLAMA, {"architectures": 5}, "architectures: saw 5, expected a list of one of LlamaForCausalLM"),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures: saw LlamaForCausalLM, expected a list"),
    (LLAMA, {"architectures": [7]}, r"architectures: saw \[7\], expected a list"),
    (LLAMA, {"architectures": None}, "architectures: saw null, expected a list"),
    (LLAMA, {"model_type": "gemma"}, "model_type: saw gemma, expected llama with LlamaForCausalLM"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config: saw .*bits.*, expected None"),
    (LLAMA, {"rope_parameters": "x"}, "rope_parameters: saw x, expected an object"),
    (LLAMA, {"rope_parameters": [1]}, r"rope_parameters: saw \[1\], expected an object"),
    (LLAMA, {"rope_scaling": 7}, "rope_scaling: saw 7, expected an object"),
    (LLAMA, {"rope_parameters": {FULL: {"rope_theta": 1e4}}}, f"rope_parameters.{FULL}: saw .*expected one"),
    (LLAMA, {"rope_theta": None}, "rope_theta: saw null, expected a number above 0"),
    (LLAMA, {"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta: saw x, expected a number"),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": ["x"]}},
        r'rope_type: saw \["x"\], expected one of default, llama3',
    ),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor is missing"),
    (LLAMA, {"rope_scaling": {**LLAMA3, "factor": 0.5}}, "rope_scaling.factor: saw 0.5, expected a number"),
    (
        LLAMA,
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5.0}},
        "rope_scaling: saw .*llama3.*, expected what rope_parameters says; keep one",
    ),
    (LLAMA, {"rope_scaling": {"type": "su"}}, "rope_type: saw su, expected one of default, llama3, linear,"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (LLAMA, {"rope_scaling": {**YARN, "beta_slow": 0}}, "rope_scaling.beta_slow: saw 0, expected a number"),
    (
        LLAMA,
        {"rope_scaling": {**YARN, "truncate": 1}},
        "rope_scaling.truncate: saw 1, expected true or false",
    ),
    (
        PHI3,
        {"rope_scaling": {"type": "linear", "factor": 2}},
        "rope_type: saw linear, expected default, with",
    ),
    (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor: saw 1.5, expected at most 1"),
    (PHI3, {"resid_pdrop": 0.1}, "resid_pdrop: saw 0.1, expected 0.0"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: saw 0.5, expected 1"),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "rope_parameters.partial_rotary_factor: saw 0.25, expected 1",
    ),
    (LLAMA, {"layer_types": [FULL, SLIDING]}, f"layer_types.1: saw {SLIDING}, expected {FULL}"),
    (QWEN, {"layer_types": [FULL, SLIDING]}, f"layer_types.1: saw {SLIDING}, expected {FULL}"),
    (QWEN, {"layer_types": [FULL]}, f"layer_types: saw .*, expected a list of 2 times {FULL}"),
    (QWEN, {"layer_types": "full"}, f"layer_types: saw full, expected a list of 2 times {FULL}"),
    (MISTRAL, {"layer_types": [SLIDING, FULL]}, f"layer_types.1: saw {FULL}, expected {SLIDING}"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window: saw 0, expected a whole number"),
    (MIXTRAL, {"num_local_experts": "8"}, "num_experts: saw 8, expected a whole number"),
    (MIXTRAL, {"num_local_experts": 8, "num_experts": 4}, "num_local_experts: saw 8, expected 4"),
    (MIXTRAL, {"router_aux_loss_coef": -1}, "router_aux_loss_coef: saw -1, expected a number of at least 0"),
    (GPT2, {"n_embd": "768"}, "n_embd: saw 768, expected a whole number"),
    (GPT2, {"n_head": 12, "num_attention_heads": 6}, "num_attention_heads: saw 6, expected 12, as n_head"),
    (GPT2, {"activation_function": "relu"}, "activation_function: saw 'relu', expected 'gelu_new'"),
]


@pytest.mark.parametrize(
    ("base", "change", "text"), BAD, ids=[f"{i}-{next(iter(b[1]))}" for i, b in enumerate(BAD)]
)
def test_a_value_that_is_not_built_is_refused_in_one_line(
    base: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    model_keys(base)
    with pytest.raises(ConfigError, match=f"^config.json: {text}") as caught:
        model_keys({**base, **change})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (LLAMA, {"partial_rotary_factor": 1.0}),
        (LLAMA, {"rope_scaling": {}, "layer_types": [FULL, FULL]}),
        (QWEN, {"layer_types": [FULL, FULL], "use_sliding_window": False, "sliding_window": 77}),
        (MISTRAL, {"layer_types": [SLIDING, SLIDING]}),
    ],
)
def test_what_says_no_more_than_is_built_is_taken(base: dict[str, Any], change: dict[str, Any]) -> None:
    assert model_keys({**base, **change}) == model_keys(base)


def test_absent_keys_mean_what_transformers_takes() -> None:
    assert model_keys(MIXTRAL)["rope_theta"] == 1e6
    assert model_keys(MISTRAL)["sliding_window"] == 4096
    assert "sliding_window" not in model_keys({**MISTRAL, "sliding_window": None})
    scaled = model_keys({**LLAMA, "rope_scaling": LLAMA3, "max_position_embeddings": 99})
    assert scaled["rope_scaling"]["original_length"] == 99


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"type": "linear", "factor": 2}, {"type": "linear", "factor": 2.0}),
        ({"type": "linear", "factor": 1.0}, None),
        ({"type": "dynamic", "factor": 2.0}, {"type": "dynamic", "factor": 2.0, "original_length": 128}),
        (YARN, {"type": "yarn", "factor": 8.0, "original_length": 16}),
        ({**YARN, "factor": None}, {"type": "yarn", "factor": 8.0, "original_length": 16}),
        (
            {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False, "beta_fast": 16},
            {
                "type": "yarn",
                "factor": 8.0,
                "original_length": 16,
                "beta_fast": 16.0,
                "attention_factor": 1.0,
                "truncate": False,
            },
        ),
        (
            {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.25},
            {"type": "yarn", "factor": 8.0, "original_length": 16, "attention_factor": 1.25},
        ),
    ],
)
def test_every_type_of_stretched_positions(said: dict[str, Any], found: dict[str, Any] | None) -> None:
    read = model_keys({**LLAMA, "rope_scaling": said, "max_position_embeddings": 128})
    assert read.get("rope_scaling") == found
    model = ModelConfig.model_validate({**WIDTHS, "rope_scaling": found or {}})
    written = hf_config(model, 128, "float32")
    assert model_keys(written).get("rope_scaling", {}).items() >= (found or {}).items()
    assert written["max_position_embeddings"] == 128


def test_dynamic_scaling_keeps_the_length_of_the_first_training() -> None:
    scaling = {"type": "dynamic", "factor": 2.0, "original_length": 128}
    model = ModelConfig.model_validate({**WIDTHS, "rope_scaling": scaling})
    assert hf_config(model, 9000, "float32")["max_position_embeddings"] == 128
    assert hf_config(model, 9000, "float32", LLAMA)["max_position_embeddings"] == 128


def test_projections_of_phi3_are_joined() -> None:
    model = ModelConfig.model_validate({**WIDTHS, "partial_rotary_factor": 0.5})
    assert architecture_of(model) == "Phi3ForCausalLM"
    assert architecture_of(ModelConfig(), PHI3) == "Phi3ForCausalLM"
    stretched = ModelConfig.model_validate({"rope_scaling": {"factor": 2.0}})
    assert architecture_of(stretched, PHI3) == "LlamaForCausalLM"
    held = {one.theirs[0]: one.ours for one in tensors(model, "Phi3ForCausalLM")}
    at, ours = "model.layers.1", "layers.1"
    assert held[f"{at}.self_attn.qkv_proj.weight"] == tuple(
        f"{ours}.attention.{name}.weight" for name in ("wq", "wk", "wv")
    )
    assert held[f"{at}.mlp.gate_up_proj.weight"] == (f"{ours}.mlp.gate.weight", f"{ours}.mlp.up.weight")
    assert f"{at}.mlp.down_proj.weight" in held


def test_frequencies_of_older_files_are_no_tensors_of_the_model() -> None:
    found = ignored(ModelConfig(layers=2), ())
    assert found == {
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
    }


def test_an_export_keeps_what_was_imported() -> None:
    model = ModelConfig()
    config = {
        **LLAMA,
        "max_position_embeddings": 4096,
        "eos_token_id": [3, 4],
        "pad_token_id": 0,
        "auto_map": {},
    }
    found = hf_config(model, 128, "float32", config)
    assert (found["max_position_embeddings"], found["eos_token_id"], found["pad_token_id"]) == (
        4096,
        [3, 4],
        0,
    )
    assert not {"bos_token_id", "auto_map"} & set(found), "absent then, absent now; and no code of theirs"
    assert hf_config(model, 9000, "float32", config)["max_position_embeddings"] == 9000
    assert hf_config(model, 128, "float32", LLAMA)["max_position_embeddings"] == 2048


def test_a_model_of_random_weights_has_no_ids_of_another_tokenizer() -> None:
    found = hf_config(ModelConfig(), 128, "float32", document_end=256)
    assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (None, 256, None)
    assert found["max_position_embeddings"] == 128


def test_a_mistral_without_its_window_stays_one() -> None:
    assert architecture_of(ModelConfig()) == "LlamaForCausalLM"
    assert architecture_of(ModelConfig(), MISTRAL) == "MistralForCausalLM"


EXPERTS = {"experts": 3, "top_k": 1, "intermediate_size": 24, "loss_coefficient": 0.5}
WIDTHS = {"vocab_size": 300, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "norm_eps": 1e-4}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_scaling": {"factor": 2.0, "original_length": 64}, "head_dim": 10},
    "MistralForCausalLM": {"sliding_window": 7, "tie_embeddings": True, "rope_theta": 5.0},
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.5, "sliding_window": 7},
    "Qwen2ForCausalLM": {"qkv_bias": True, "intermediate_size": 40},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "MixtralForCausalLM": {"sliding_window": 9, "moe": EXPERTS},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "moe": {**EXPERTS, "normalize": False}},
    "Olmo2ForCausalLM": {"family": "olmo2"},
    "GPT2LMHeadModel": {"family": "gpt2", "kv_heads": 4, "max_positions": 50, "intermediate_size": 33},
}


@pytest.mark.parametrize("architecture", MODELS)
def test_what_is_written_is_read_back(architecture: str) -> None:
    model = ModelConfig.model_validate({**WIDTHS, **MODELS[architecture]})
    written = hf_config(model, 50, "bfloat16")
    assert written["architectures"] == [architecture]
    assert written["dtype"] == "bfloat16"
    read = model_keys(written)
    if "moe" not in MODELS[architecture]:
        assert read["intermediate_size"] == model.intermediate_size
    assert ModelConfig.model_validate({**read, "intermediate_size": model.intermediate_size}) == model


def test_keys_of_one_architecture_alone() -> None:
    said = {name: hf_config(ModelConfig.model_validate({**WIDTHS, **keys}), 50, "float32")
            for name, keys in MODELS.items()}  # fmt: skip
    assert {name for name, found in said.items() if "use_sliding_window" in found} == {
        "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}  # fmt: skip
    assert not any(found.get("use_sliding_window") for found in said.values())
    assert {name for name, found in said.items() if "num_local_experts" in found} == {"MixtralForCausalLM"}
    mixture = said["Qwen3MoeForCausalLM"]
    names = ("num_experts", "num_experts_per_tok", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
    assert [mixture[name] for name in names] == [3, 1, 1, [], False]
    llama = said["LlamaForCausalLM"]
    assert (llama["attention_bias"], llama["head_dim"], llama["hidden_act"]) == (False, 10, "silu")
    assert said["MistralForCausalLM"]["rope_scaling"] is None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"moe": {**EXPERTS, "shared_intermediate_size": 4}}, "moe.shared_intermediate_size: saw 4, which"),
        ({"moe": {**EXPERTS, "router": "sigmoid"}}, "moe.router: saw sigmoid, which none of"),
        ({"moe": {**EXPERTS, "balance": "bias"}}, "moe.balance: saw bias, which none of"),
        ({"moe": {**EXPERTS, "normalize": False}}, "moe.normalize: saw false, which Mixtral cannot express"),
        ({"qk_norm": True, "qkv_bias": True}, "qkv_bias: saw true, which Qwen3ForCausalLM does not have"),
        ({"qkv_bias": True, "moe": EXPERTS}, "qkv_bias: saw true, which MixtralForCausalLM does not have"),
        ({"qk_norm": True, "sliding_window": 4}, "sliding_window: saw 4, expected null for Qwen3ForCausalLM"),
        ({"qkv_bias": True, "sliding_window": 4}, "sliding_window: saw 4, expected null for Qwen2"),
        ({"qk_norm": True, "partial_rotary_factor": 0.5}, "partial_rotary_factor: saw 0.5, expected 1"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"factor": 2}}, "rope_scaling.type: saw llama3 with"),
    ],
)  # fmt: skip
def test_what_no_architecture_has_is_not_exported(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.{line}"):
        architecture_of(ModelConfig.model_validate(change))
    dense = {"shared_intermediate_size": 4, "router": "sigmoid", "balance": "bias", "normalize": False}
    assert architecture_of(ModelConfig.model_validate({"moe": dense})) == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("base", "key", "taken", "refused"),
    [
        (LLAMA, "mlp_bias", [False], True),
        (LLAMA, "attention_bias", [False, None], True),
        (LLAMA, "attention_dropout", [0.0, 0], 0.1),
        (LLAMA, "pretraining_tp", [1, None], 2),
        (MIXTRAL, "decoder_sparse_step", [1], 2),
        (MIXTRAL, "mlp_only_layers", [[], None], [1]),
        (MIXTRAL, "router_jitter_noise", [0.0], 0.1),
        (QWEN, "use_sliding_window", [False], True),
        (GPT2, "activation_function", ["gelu_new", "gelu_pytorch_tanh"], "gelu"),
        (GPT2, "scale_attn_weights", [True], False),
        (GPT2, "scale_attn_by_inverse_layer_idx", [False], True),
        (GPT2, "reorder_and_upcast_attn", [False], True),
        (GPT2, "add_cross_attention", [False], True),
        (OLMO2, "attention_bias", [False], True),
        (OLMO2, "attention_dropout", [0.0], 0.1),
    ],
)
def test_keys_that_must_say_what_is_built(
    base: dict[str, Any], key: str, taken: list[Any], refused: Any
) -> None:
    for value in taken:
        assert model_keys({**base, key: value}) == model_keys(base)
    with pytest.raises(ConfigError, match=f"^config.json: {key}: saw "):
        model_keys({**base, key: refused})


def test_bounds_of_numbers_are_taken() -> None:
    assert model_keys({**MIXTRAL, "router_aux_loss_coef": 0})["moe"]["loss_coefficient"] == 0.0
    scaled = model_keys({**LLAMA, "rope_scaling": {**LLAMA3, "factor": 1}})
    assert scaled["rope_scaling"]["factor"] == 1.0
    assert model_keys({**GPT2, "n_embd": 12, "n_head": 1})["intermediate_size"] == 4 * 12


def test_biases_are_qwen2s() -> None:
    assert model_keys({**QWEN, "attention_bias": True})["qkv_bias"] is True
    assert "qkv_bias" not in model_keys(LLAMA)


def test_a_long_value_is_cut_to_sixty() -> None:
    assert [len(show("x" * length)) for length in (59, 60, 61, 99)] == [59, 60, 60, 60]
    assert show("x" * 61) == "x" * 57 + "..."
    assert (show("a  b"), show([1, "a"]), show(True)) == ("a b", '[1, "a"]', "true")


def test_linear_weights_of_gpt2_are_transposed_and_nothing_else() -> None:
    model = ModelConfig(family="gpt2", layers=1, heads=4, kv_heads=4, max_positions=8, tie_embeddings=True)
    held = list(tensors(model, "GPT2LMHeadModel"))
    assert {name for one in held if one.transposed for name in one.theirs} == {
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert sum(len(one.ours) for one in held) == len({name for one in held for name in one.ours})
    assert len(held) == 2 + 6 * 2 + 2
    untied = model.model_copy(update={"tie_embeddings": False})
    assert [one.theirs for one in tensors(untied, "GPT2LMHeadModel")][len(held) :] == [("lm_head.weight",)]
