"""From a checkpoint's config.json to our ``model`` section. Torch-free.

Everything in config.json is either expressed in our config or refused in one line that names the key: a model
that is nearly the same gives nonsense without a word. An absent key means what transformers takes it for in
that architecture (``DEFAULTS``; a test compares them with the installed version).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.models.families.registry import FAMILIES
from picotron_ray.models.huggingface.config_reader import refuse
from picotron_ray.models.huggingface.mapping import HuggingFaceMapping

BY_ARCHITECTURE: dict[str, HuggingFaceMapping] = {
    architecture: family.huggingface
    for family in FAMILIES.values()
    for architecture in family.huggingface.defaults
}
"""The mapping of the family that an architecture belongs to."""

DEFAULTS: dict[str, Mapping[str, Any]] = {
    architecture: mapping.defaults[architecture] for architecture, mapping in BY_ARCHITECTURE.items()
}
"""Values that transformers takes for absent keys, by architecture; those that decide what is computed."""

ARCHITECTURES = tuple(DEFAULTS)


def architecture_in(hf: Mapping[str, Any]) -> str:
    """The architecture that config.json names. Raises ConfigError where it is none of ours."""
    named = hf.get("architectures")
    expected = f"one of {', '.join(ARCHITECTURES)}"
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise refuse("architectures", named, f"a list of {expected}")
    architecture = named[0]
    if architecture not in ARCHITECTURES:
        raise refuse("architectures", architecture, expected)
    kind = BY_ARCHITECTURE[architecture].model_types[architecture]
    if hf.get("model_type", kind) != kind:
        raise refuse("model_type", hf["model_type"], f"{kind} with {architecture}")
    return architecture


def model_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for a checkpoint's config.json.

    Raises ConfigError, one line that names the key of config.json.
    """
    architecture = architecture_in(hf)
    return BY_ARCHITECTURE[architecture].model_keys(architecture, hf)
