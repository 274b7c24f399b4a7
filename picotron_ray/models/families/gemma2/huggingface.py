"""Tensors and config.json of Gemma2ForCausalLM. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.families.gemma2.table import parameter_table
from picotron_ray.models.huggingface.config_reader import Keys
from picotron_ray.models.huggingface.decoder import base_keys, frequencies
from picotron_ray.models.huggingface.gemma import (
    GEMMA_DEFAULTS,
    GEMMA_FIXED,
    cap_keys,
    gemma_config,
    gemma_keys,
    gemma_tensors,
)
from picotron_ray.models.huggingface.mapping import HuggingFaceMapping

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

ARCHITECTURE = "Gemma2ForCausalLM"
DEFAULTS: dict[str, Any] = {
    **GEMMA_DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def model_keys(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for its config.json. Raises ConfigError, one line that names the key."""
    keys = Keys(hf, DEFAULTS)
    keys.fixed(GEMMA_FIXED)
    caps = cap_keys(keys, "attn_logit_softcapping", "attention_softcap")
    return {"family": "gemma2", **base_keys(hf, keys), **gemma_keys(keys, every=2), **caps}


def hf_config(model: ModelConfig, architecture: str, length: int) -> dict[str, Any]:
    """Keys of config.json that say what is computed."""
    return {**gemma_config(model, length), "attn_logit_softcapping": model.attention_softcap}


HUGGINGFACE = HuggingFaceMapping(
    defaults={ARCHITECTURE: DEFAULTS},
    model_types={ARCHITECTURE: "gemma2"},
    model_keys=model_keys,
    architecture_of=lambda model, imported: ARCHITECTURE,
    tensors=lambda model, architecture, names: gemma_tensors(parameter_table(model)),
    ignored=lambda model, names: frequencies(model),
    config=hf_config,
)
