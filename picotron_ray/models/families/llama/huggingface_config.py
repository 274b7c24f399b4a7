"""config.json of Llama, Mistral, Phi-3, Qwen2, Qwen3, Mixtral and Qwen3-MoE. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.models.huggingface.config_reader import Keys, refuse
from picotron_ray.models.huggingface.decoder import BASE_DEFAULTS, base_keys, check_layer_types

PHI3 = "Phi3ForCausalLM"
WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM", PHI3)
"""Architectures of which every block may have a window."""

_QWEN: dict[str, Any] = {
    **BASE_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        **BASE_DEFAULTS,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    },
    "MistralForCausalLM": {
        **BASE_DEFAULTS,
        "intermediate_size": 14336,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    PHI3: {
        **BASE_DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
    "MixtralForCausalLM": {
        **BASE_DEFAULTS,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "Qwen3MoeForCausalLM": {
        **_QWEN,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
}
"""Values that transformers takes for absent keys, by architecture; those that decide what is computed."""

_ALIASES = {"num_local_experts": "num_experts"}  # Mixtral's name, and Qwen3-MoE's in transformers 5
_MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
# Keys that must have these values where they are there at all; anything else is not what ours computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "embd_pdrop": (0.0,),
    "resid_pdrop": (0.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "pretraining_tp": (1, None),
    "router_jitter_noise": (0.0,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}


def model_keys(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for a checkpoint's config.json. Raises ConfigError."""
    keys = Keys(hf, DEFAULTS[architecture], _ALIASES)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    keys.fixed(_FIXED)
    if hf.get("attention_bias") and not is_qwen2:
        raise refuse("attention_bias", hf["attention_bias"], "false: biases are Qwen2's only")
    found = base_keys(hf, keys, partial=architecture == PHI3)
    if architecture == PHI3 and "rope_scaling" in found:
        raise refuse("rope_type", found["rope_scaling"]["type"], f"default, with {architecture}")
    if is_qwen2:
        found["qkv_bias"] = True
    if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        found["qk_norm"] = True
    window = keys.whole_or_null("sliding_window") if architecture in WINDOWED else None
    if window:
        found["sliding_window"] = window
    check_layer_types(keys.get("layer_types"), found["layers"], window)
    if architecture in _MIXTURES:
        found["moe"] = _mixture_keys(keys, architecture)
    else:
        found["intermediate_size"] = keys.whole("intermediate_size")
    return found


def _mixture_keys(keys: Keys, architecture: str) -> dict[str, Any]:
    is_mixtral = architecture == "MixtralForCausalLM"
    return {
        "experts": keys.whole("num_experts"),
        "top_k": keys.whole("num_experts_per_tok"),
        "intermediate_size": keys.whole("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        "normalize": True if is_mixtral else keys.flag("norm_topk_prob"),
        "loss_coefficient": keys.number("router_aux_loss_coef", least=0.0),
    }
