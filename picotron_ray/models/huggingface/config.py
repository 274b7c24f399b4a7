"""From a checkpoint's config.json to our ``model`` section. Torch-free.

What config.json asks for is either expressed in our config or refused in one line that names the key: a
model that is nearly the same gives nonsense without a word. A key that is absent means what transformers
takes it for in that architecture (``DEFAULTS``; a test compares them with the installed version).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.errors import ConfigError
from picotron_ray.models.huggingface import gpt2
from picotron_ray.models.huggingface.config_reader import Keys, refuse, show

_BASE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "layer_types": None,
}
_QWEN: dict[str, Any] = {
    **_BASE,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        **_BASE,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    },
    "MistralForCausalLM": {
        **_BASE,
        "intermediate_size": 14336,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
    "MixtralForCausalLM": {
        **_BASE,
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
    gpt2.ARCHITECTURE: gpt2.DEFAULTS,
}
"""What transformers takes for absent keys, by architecture; those that decide what is computed."""

ARCHITECTURES = tuple(DEFAULTS)
_ALIASES = {"num_local_experts": "num_experts"}  # Mixtral's name, and Qwen3-MoE's in transformers 5
_WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM")
_MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
# Keys that must have these values where they are there at all; anything else is not what ours computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "pretraining_tp": (1, None),
    "router_jitter_noise": (0.0,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}


def model_type(architecture: str) -> str:
    """What config.json calls the family of an architecture."""
    special = {"Qwen3MoeForCausalLM": "qwen3_moe", gpt2.ARCHITECTURE: "gpt2"}
    return special.get(architecture, architecture.removesuffix("ForCausalLM").lower())


def architecture_in(hf: Mapping[str, Any]) -> str:
    """The architecture that config.json names. Raises ConfigError where it is none of ours."""
    named = hf.get("architectures")
    expected = f"one of {', '.join(ARCHITECTURES)}"
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise refuse("architectures", named, f"a list of {expected}")
    if named[0] not in ARCHITECTURES:
        raise refuse("architectures", named[0], expected)
    kind = model_type(named[0])
    if hf.get("model_type", kind) != kind:
        raise refuse("model_type", hf["model_type"], f"{kind} with {named[0]}")
    return named[0]


def model_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for a checkpoint's config.json.

    Raises ConfigError, one line that names the key of config.json.
    """
    architecture = architecture_in(hf)
    if architecture == gpt2.ARCHITECTURE:
        return gpt2.model_keys(hf)
    keys = Keys(hf, DEFAULTS[architecture], _ALIASES)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    keys.fixed(_FIXED)
    if hf.get("attention_bias") and not is_qwen2:
        raise refuse("attention_bias", hf["attention_bias"], "false: biases are Qwen2's only")
    heads, hidden = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    found: dict[str, Any] = {
        "vocab_size": keys.whole("vocab_size"),
        "hidden_size": hidden,
        "layers": keys.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.whole_or_null("num_key_value_heads") or heads,
        "norm_eps": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        **_rope_keys(hf, keys),
    }
    width = keys.whole_or_null("head_dim")
    if width and width * heads != hidden:
        found["head_dim"] = width
    if is_qwen2:
        found["qkv_bias"] = True
    if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        found["qk_norm"] = True
    window = keys.whole_or_null("sliding_window") if architecture in _WINDOWED else None
    if window:
        found["sliding_window"] = window
    keys.whole("max_position_embeddings")  # an export writes it back
    _check_layer_types(keys.get("layer_types"), found["layers"], window)
    if architecture in _MIXTURES:
        found["moe"] = _mixture_keys(keys, architecture)
    else:
        found["intermediate_size"] = keys.whole("intermediate_size")
    return found


def _check_layer_types(kinds: Any, layers: int, window: int | None) -> None:
    """Every block of ours attends alike."""
    if kinds is None:
        return
    built = "sliding_attention" if window else "full_attention"
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise refuse("layer_types", kinds, f"a list of {layers} times {built}")
    for layer, kind in enumerate(kinds):
        if kind != built:
            raise refuse(f"layer_types.{layer}", kind, f"{built}, as all other blocks have it")


def _mixture_keys(keys: Keys, architecture: str) -> dict[str, Any]:
    is_mixtral = architecture == "MixtralForCausalLM"
    return {
        "experts": keys.whole("num_experts"),
        "top_k": keys.whole("num_experts_per_tok"),
        "intermediate_size": keys.whole("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        "normalize": True if is_mixtral else keys.flag("norm_topk_prob"),
        "loss_coefficient": keys.number("router_aux_loss_coef", least=0.0),
    }


def _rope_given(hf: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` (before), and which of them it is."""
    found = {key: hf[key] for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise refuse(key, value, "an object")
        nested = next((name for name, part in value.items() if isinstance(part, dict)), None)
        if nested:
            raise refuse(f"{key}.{nested}", value[nested], "one set of parameters for all blocks")
    if len(found) == 2 and hf["rope_scaling"] != hf["rope_parameters"]:
        raise refuse("rope_scaling", hf["rope_scaling"], "what rope_parameters says; keep one of them")
    return next(iter(found.items()), ("rope_parameters", {}))


def _rope_keys(hf: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    place, given = _rope_given(hf)
    for where, part in (("", hf), (f"{place}.", given)):
        if part.get("partial_rotary_factor") not in (None, 1):
            key = f"{where}partial_rotary_factor"
            raise refuse(key, part["partial_rotary_factor"], "1: whole heads are turned here")
    rope = Keys(given, {}, inside=f"{place}.")
    found = {"rope_theta": rope.number("rope_theta") if "rope_theta" in given else keys.number("rope_theta")}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return found
    if kind != "llama3":
        raise ConfigError(f"config.json: rope_type: saw {show(kind)}, expected default or llama3")
    original = "original_max_position_embeddings"
    length = keys if original not in given else rope
    if hf.get(original, given.get(original)) != given.get(original):
        raise refuse(original, hf[original], f"{show(given.get(original))}, as {place} says")
    return {
        **found,
        "rope_scaling": {
            "factor": rope.number("factor", least=1.0),
            "low_frequency_factor": rope.number("low_freq_factor"),
            "high_frequency_factor": rope.number("high_freq_factor"),
            "original_length": length.whole(original if length is rope else "max_position_embeddings"),
        },
    }
