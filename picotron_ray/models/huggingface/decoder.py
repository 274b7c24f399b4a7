"""Names of tensors and keys of config.json that the decoders after Llama share. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.huggingface.config_reader import Keys, refuse
from picotron_ray.models.huggingface.rope import fixed_length, rope_keys, scaling_of

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


def width_keys(keys: Keys) -> dict[str, Any]:
    """Keys of our ``model`` section that are read alike for every decoder, rotary positions aside."""
    heads, hidden = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    found: dict[str, Any] = {
        "vocab_size": keys.whole("vocab_size"),
        "hidden_size": hidden,
        "layers": keys.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.whole_or_null("num_key_value_heads") or heads,
        "norm_eps": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
    }
    width = keys.whole_or_null("head_dim")
    if width and width * heads != hidden:
        found["head_dim"] = width
    keys.whole("max_position_embeddings")  # an export writes it back
    return found


def base_keys(hf: Mapping[str, Any], keys: Keys, *, partial: bool = False) -> dict[str, Any]:
    """Keys of our ``model`` section that are read alike for every decoder.

    Args:
        partial: whether the architecture may turn a part of each head alone.
    """
    return {**width_keys(keys), **rope_keys(hf, keys, partial=partial)}


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
        "max_position_embeddings": fixed_length(model) or length,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling_of(model),
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
