"""Tensors and config.json of Gemma3ForCausalLM, the decoder of text. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.families.gemma3.table import parameter_table
from picotron_ray.models.huggingface.config_reader import Keys, refuse
from picotron_ray.models.huggingface.decoder import frequencies, width_keys
from picotron_ray.models.huggingface.gemma import (
    GEMMA_DEFAULTS,
    GEMMA_FIXED,
    gemma_config,
    gemma_keys,
    gemma_tensors,
)
from picotron_ray.models.huggingface.mapping import HuggingFaceMapping
from picotron_ray.models.huggingface.rope import scaling_keys
from picotron_ray.models.huggingface.windows import FULL, SLIDING

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

ARCHITECTURE = "Gemma3ForCausalLM"
DEFAULTS: dict[str, Any] = {
    **GEMMA_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
}
_PARAMETERS = "rope_parameters"


def model_keys(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for its config.json. Raises ConfigError, one line that names the key."""
    keys = Keys(hf, DEFAULTS)
    keys.fixed({**GEMMA_FIXED, "attn_logit_softcapping": (None,)})
    mixed = gemma_keys(keys, every=keys.whole("sliding_window_pattern"))
    rope = _rope_keys(hf, keys)
    if "sliding_window" not in mixed:  # no block has the other base
        del rope["rope_local_theta"]
    return {"family": "gemma3", **width_keys(keys), **rope, **mixed}


def _rope_keys(hf: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Both bases and the scaling, by kind of block (transformers 5) or in keys of their own (before)."""
    given, stretched = hf.get(_PARAMETERS) or {}, hf.get("rope_scaling") or {}
    for name, value in ((_PARAMETERS, given), ("rope_scaling", stretched)):
        if not isinstance(value, dict):
            raise refuse(name, value, "an object")
    for name, value in given.items():
        if name not in (FULL, SLIDING) or not isinstance(value, dict | None):
            raise refuse(f"{_PARAMETERS}.{name}", value, f"an object for each of {FULL} and {SLIDING}")
    whole, local = {**(given.get(FULL) or {}), **stretched}, given.get(SLIDING) or {}
    for name, part in ((FULL, whole), (SLIDING, local)):
        if part.get("partial_rotary_factor") not in (None, 1):
            at = f"{_PARAMETERS}.{name}.partial_rotary_factor"
            raise refuse(at, part["partial_rotary_factor"], "1: whole heads are turned here")
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise refuse(f"{_PARAMETERS}.{SLIDING}.rope_type", kind, "default: a window is not stretched")
    scaling = scaling_keys(hf, keys, "rope_scaling" if stretched else f"{_PARAMETERS}.{FULL}", whole)
    return {
        "rope_theta": _theta(whole, FULL, keys, "rope_theta"),
        "rope_local_theta": _theta(local, SLIDING, keys, "rope_local_base_freq"),
        **({"rope_scaling": scaling} if scaling else {}),
    }


def _theta(part: Mapping[str, Any], name: str, keys: Keys, otherwise: str) -> float:
    if part.get("rope_theta") is None:
        return keys.number(otherwise)
    return Keys(part, {}, inside=f"{_PARAMETERS}.{name}.").number("rope_theta")


def hf_config(model: ModelConfig, architecture: str, length: int) -> dict[str, Any]:
    """Keys of config.json that say what is computed."""
    local = model.rope_local_theta or DEFAULTS["rope_local_base_freq"]
    return {**gemma_config(model, length), "rope_local_base_freq": local, "attn_logit_softcapping": None}


HUGGINGFACE = HuggingFaceMapping(
    defaults={ARCHITECTURE: DEFAULTS},
    model_types={ARCHITECTURE: "gemma3_text"},
    model_keys=model_keys,
    architecture_of=lambda model, imported: ARCHITECTURE,
    tensors=lambda model, architecture, names: gemma_tensors(parameter_table(model)),
    ignored=lambda model, names: frequencies(model),
    config=hf_config,
)
