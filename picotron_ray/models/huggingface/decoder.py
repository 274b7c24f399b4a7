"""Names of tensors and keys of config.json that the decoders after Llama share. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.errors import ConfigError
from picotron_ray.models.huggingface.config_reader import Keys, refuse, show

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

BASE_DEFAULTS: dict[str, Any] = {
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
ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
PROJECTIONS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_FREQUENCIES = "rotary_emb.inv_freq"


def frequencies(model: ModelConfig) -> set[str]:
    """The rotary frequencies that older files hold."""
    blocks = {f"model.layers.{layer}.self_attn.{_FREQUENCIES}" for layer in range(model.layers)}
    return blocks | {f"model.{_FREQUENCIES}"}


def base_keys(hf: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Keys of our ``model`` section that are read alike for every decoder."""
    heads, hidden = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    found: dict[str, Any] = {
        "vocab_size": keys.whole("vocab_size"),
        "hidden_size": hidden,
        "layers": keys.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.whole_or_null("num_key_value_heads") or heads,
        "norm_eps": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        **rope_keys(hf, keys),
    }
    width = keys.whole_or_null("head_dim")
    if width and width * heads != hidden:
        found["head_dim"] = width
    keys.whole("max_position_embeddings")  # an export writes it back
    return found


def base_config(model: ModelConfig, length: int) -> dict[str, Any]:
    """Keys of config.json that are written alike for every decoder."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": length,
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling(model),
        "attention_bias": False,
    }


def check_layer_types(kinds: Any, layers: int, window: int | None) -> None:
    """Every block of ours attends alike."""
    if kinds is None:
        return
    built = "sliding_attention" if window else "full_attention"
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise refuse("layer_types", kinds, f"a list of {layers} times {built}")
    for layer, kind in enumerate(kinds):
        if kind != built:
            raise refuse(f"layer_types.{layer}", kind, f"{built}, as all other blocks have it")


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


def rope_keys(hf: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Base and scaling of the rotary positions."""
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


def _scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling.factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
