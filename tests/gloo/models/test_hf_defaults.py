"""Keys that config.json leaves out mean what the installed transformers takes them for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picotron_ray.models.huggingface.config import DEFAULTS, model_keys
from tests.support.gloo.hf_kit import transformers

FAMILIES = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Phi3ForCausalLM": "Phi3",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "MixtralForCausalLM": "Mixtral",
    "Qwen3MoeForCausalLM": "Qwen3Moe",
    "GPT2LMHeadModel": "GPT2",
    "Olmo2ForCausalLM": "Olmo2",
    "Gemma2ForCausalLM": "Gemma2",
    "Gemma3ForCausalLM": "Gemma3Text",
    "DeepseekV2ForCausalLM": "DeepseekV2",
    "DeepseekV3ForCausalLM": "DeepseekV3",
    "GptOssForCausalLM": "GptOss",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# values of no class's defaults; what one class does not know is of no effect in its config.json
SAID: dict[str, Any] = {
    "vocab_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.25,
    "rope_theta": 77.0,
    "rope_scaling": LLAMA3,
    "tie_word_embeddings": True,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.5,
    "sliding_window": 5,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 9.0,
    "rope_local_base_freq": 33.0,
    "sliding_window_pattern": 2,
}
SAID_DEEPSEEK = {
    **{key: value for key, value in SAID.items() if key not in ("router_aux_loss_coef", "num_local_experts")},
    "norm_topk_prob": False,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
    "n_routed_experts": 12,
    "n_shared_experts": 3,
    "n_group": 6,
    "topk_group": 2,
    "routed_scaling_factor": 3.0,
}
NEEDED = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 2}}  # transformers itself fails without
SAID_GPT2 = {"vocab_size": 96, "n_embd": 24, "n_layer": 3, "n_head": 2, "n_positions": 40, "n_inner": 7}


def theirs(architecture: str, said: dict[str, Any]) -> dict[str, Any]:
    """The config that transformers makes of a config.json, every key said."""
    config = getattr(transformers, f"{FAMILIES[architecture]}Config").from_dict(json.loads(json.dumps(said)))
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**found, "architectures": [architecture]}


def cases(architecture: str) -> list[dict[str, Any]]:
    """Nothing said, and everything but one key."""
    whole = SAID_GPT2 if architecture == "GPT2LMHeadModel" else SAID
    if architecture == "Phi3ForCausalLM":
        whole = {key: value for key, value in SAID.items() if key != "rope_scaling"}
        whole["partial_rotary_factor"] = 0.25
    whole = SAID_DEEPSEEK if architecture.startswith("Deepseek") else whole
    found = [{key: value for key, value in whole.items() if key != left_out} for left_out in (*whole, None)]
    needed = NEEDED.get(architecture, {})
    return [{"architectures": [architecture], **needed, **said} for said in ({}, *found)]


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_absent_keys_mean_what_transformers_takes(architecture: str) -> None:
    assert set(FAMILIES) == set(DEFAULTS)
    for said in cases(architecture):
        assert model_keys(said) == model_keys(theirs(architecture, said)), said


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_each_default_is_that_of_the_class(architecture: str) -> None:
    found = getattr(transformers, f"{FAMILIES[architecture]}Config")()
    length = DEFAULTS[architecture].get("max_position_embeddings", DEFAULTS[architecture].get("n_positions"))
    assert found.max_position_embeddings == length
