"""Tensors and config.json of Olmo2ForCausalLM. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.families.olmo2.table import parameter_table
from picotron_ray.models.huggingface.config_reader import Keys
from picotron_ray.models.huggingface.decoder import (
    BASE_DEFAULTS,
    ENDS,
    PROJECTIONS,
    base_config,
    base_keys,
    frequencies,
)
from picotron_ray.models.huggingface.mapping import Held, HuggingFaceMapping

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

ARCHITECTURE = "Olmo2ForCausalLM"
DEFAULTS: dict[str, Any] = {
    **BASE_DEFAULTS,
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
# Keys that must have these values where they are there at all; anything else is not what ours computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "quantization_config": (None,),
}
_BLOCK = {
    **PROJECTIONS,
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


def model_keys(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for its config.json. Raises ConfigError, one line that names the key."""
    keys = Keys(hf, DEFAULTS)
    keys.fixed(_FIXED)
    return {
        "family": "olmo2",
        **base_keys(hf, keys),
        "intermediate_size": keys.whole("intermediate_size"),
    }


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once."""
    for spec in parameter_table(model):
        if spec.layer is None:
            yield Held((spec.name,), (ENDS[spec.name],))
            continue
        stem, _, leaf = spec.name.removeprefix(f"layers.{spec.layer}.").rpartition(".")
        yield Held((spec.name,), (f"model.layers.{spec.layer}.{_BLOCK[stem]}.{leaf}",))


HUGGINGFACE = HuggingFaceMapping(
    defaults={ARCHITECTURE: DEFAULTS},
    model_types={ARCHITECTURE: "olmo2"},
    model_keys=model_keys,
    architecture_of=lambda model, imported: ARCHITECTURE,
    tensors=tensors,
    ignored=lambda model, names: frequencies(model),
    config=lambda model, architecture, length: base_config(model, length),
)
