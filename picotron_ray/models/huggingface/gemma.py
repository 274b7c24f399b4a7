"""Names of tensors and keys of config.json that Gemma 2 and Gemma 3 share. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from picotron_ray.models.huggingface.config_reader import Keys
from picotron_ray.models.huggingface.decoder import BASE_DEFAULTS, ENDS, PROJECTIONS, base_config
from picotron_ray.models.huggingface.mapping import Held
from picotron_ray.models.huggingface.windows import layer_types, window_keys
from picotron_ray.models.parameters import ParameterSpec

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

GEMMA_DEFAULTS: dict[str, Any] = {
    **BASE_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# Keys that must have these values where they are there at all; anything else is not what ours computes.
GEMMA_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
}
_BLOCK = {
    **PROJECTIONS,
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def gemma_tensors(table: Iterable[ParameterSpec]) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once."""
    for spec in table:
        if spec.layer is None:
            yield Held((spec.name,), (ENDS[spec.name],))
            continue
        stem, _, leaf = spec.name.removeprefix(f"layers.{spec.layer}.").rpartition(".")
        yield Held((spec.name,), (f"model.layers.{spec.layer}.{_BLOCK[stem]}.{leaf}",))


def gemma_keys(keys: Keys, *, every: int) -> dict[str, Any]:
    """Keys of our ``model`` section besides the widths and the rotary positions.

    Args:
        every: so many blocks one sees whole rows, where ``layer_types`` is absent.
    """
    found = {
        "intermediate_size": keys.whole("intermediate_size"),
        "query_pre_attn_scalar": keys.whole("query_pre_attn_scalar"),
        **window_keys(keys, keys.whole("num_hidden_layers"), every),
    }
    return found | cap_keys(keys, "final_logit_softcapping", "logit_softcap")


def cap_keys(keys: Keys, theirs: str, ours: str) -> dict[str, float]:
    """A cap under our name; nothing where there is none."""
    return {} if keys.get(theirs) is None else {ours: keys.number(theirs)}


def gemma_config(model: ModelConfig, length: int) -> dict[str, Any]:
    """Keys of config.json that are written alike for both."""
    found = base_config(model, length)
    del found["hidden_act"]
    return {
        **found,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_size,
        "sliding_window": model.sliding_window,
        "layer_types": layer_types(model),
        "final_logit_softcapping": model.logit_softcap,
    }
