"""Rotary positions in config.json, both ways: base, share of a head, stretching. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.decoder.positions import yarn_mscale
from picotron_ray.models.huggingface.config_reader import Keys, refuse, show

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def rope_given(hf: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
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


def _part(hf: Mapping[str, Any], place: str, given: Mapping[str, Any], *, partial: bool) -> dict[str, Any]:
    """The share of a head that turns; refused where the architecture turns whole heads."""
    name, found = "partial_rotary_factor", 1.0
    for where, part in (("", hf), (f"{place}.", given)):
        if part.get(name) is None:
            continue
        value = Keys(part, {}, inside=where).number(name)
        if value > 1:
            raise refuse(where + name, part[name], "at most 1")
        if value != 1 and not partial:
            raise refuse(where + name, part[name], "1: whole heads are turned here")
        found = value
    return {} if found == 1.0 else {name: found}


def rope_keys(hf: Mapping[str, Any], keys: Keys, *, partial: bool = False) -> dict[str, Any]:
    """Base and scaling of the rotary positions.

    Args:
        partial: whether the architecture may turn a part of each head alone.
    """
    place, given = rope_given(hf)
    rope = Keys(given, {}, inside=f"{place}.")
    theta = rope.number("rope_theta") if "rope_theta" in given else keys.number("rope_theta")
    found = {"rope_theta": theta, **_part(hf, place, given, partial=partial)}
    scaling = scaling_keys(hf, keys, place, given)
    return {**found, "rope_scaling": scaling} if scaling else found


def scaling_keys(
    hf: Mapping[str, Any], keys: Keys, place: str, given: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Our ``model.rope_scaling`` of one object with rotary parameters; None where nothing is stretched.

    Args:
        place: the object's name in config.json, for messages.

    Raises ConfigError for an unknown type of scaling, one line.
    """
    rope, kind = Keys(given, {}, inside=f"{place}."), given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise refuse("rope_type", kind, f"one of default, {', '.join(_KINDS)}")
    return _KINDS[kind](rope, lambda: _original(hf, keys, rope, place, given))


def _original(
    hf: Mapping[str, Any], keys: Keys, rope: Keys, place: str, given: Mapping[str, Any]
) -> tuple[int, int]:
    """Tokens of a row in the first training, and of the longest row now."""
    name, longest = "original_max_position_embeddings", keys.whole("max_position_embeddings")
    if hf.get(name, given.get(name)) != given.get(name):
        raise refuse(name, hf[name], f"{show(given.get(name))}, as {place} says")
    return (rope.whole(name) if name in given else longest), longest


_Lengths = Callable[[], tuple[int, int]]


def _llama3_keys(rope: Keys, lengths: _Lengths) -> dict[str, Any]:
    return {
        "factor": rope.number("factor", least=1.0),
        "low_frequency_factor": rope.number("low_freq_factor"),
        "high_frequency_factor": rope.number("high_freq_factor"),
        "original_length": lengths()[0],
    }


def _linear_keys(rope: Keys, lengths: _Lengths) -> dict[str, Any] | None:
    factor = rope.number("factor", least=1.0)
    return None if factor == 1.0 else {"type": "linear", "factor": factor}


def _dynamic_keys(rope: Keys, lengths: _Lengths) -> dict[str, Any]:
    """The longest row of config.json is that of the first training here."""
    return {"type": "dynamic", "factor": rope.number("factor", least=1.0), "original_length": lengths()[1]}


def _yarn_keys(rope: Keys, lengths: _Lengths) -> dict[str, Any] | None:
    """DeepSeek's two coefficients make one factor of cosine and sine, unless that is said."""
    optional = {key: rope.number(key) for key in ("mscale", "mscale_all_dim") if rope.has(key)}
    original, longest = lengths()
    factor = rope.number("factor", least=1.0) if rope.has("factor") else longest / original
    sharper = rope.number("attention_factor") if rope.has("attention_factor") else None
    if sharper is None and len(optional) == 2:
        sharper = yarn_mscale(factor, optional["mscale"]) / yarn_mscale(factor, optional["mscale_all_dim"])
    if factor == 1.0 and sharper in (None, 1.0):
        return None
    found: dict[str, Any] = {"type": "yarn", "factor": factor, "original_length": original}
    found |= {key: rope.number(key) for key in ("beta_fast", "beta_slow") if rope.has(key)}
    found |= {} if sharper is None else {"attention_factor": sharper}
    return found | ({"truncate": rope.flag("truncate")} if rope.has("truncate") else {})


_KINDS: dict[str, Callable[[Keys, _Lengths], dict[str, Any] | None]] = {
    "llama3": _llama3_keys,
    "linear": _linear_keys,
    "dynamic": _dynamic_keys,
    "yarn": _yarn_keys,
}


def scaling_of(model: ModelConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of config.json; None: nothing is stretched."""
    scaling = model.rope_scaling
    if scaling.factor == 1.0 and scaling.type != "dynamic":
        return None
    found: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type == "llama3":
        found |= {"low_freq_factor": scaling.low_frequency_factor}
        found |= {"high_freq_factor": scaling.high_frequency_factor}
    if scaling.type == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        found |= {"truncate": scaling.truncate}
        found |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    if scaling.type in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = scaling.original_length
    return found


def fixed_length(model: ModelConfig) -> int | None:
    """The longest row that an export must say, whatever it was trained on; None: any.

    With dynamic scaling transformers takes it for that of the first training.
    """
    return model.rope_scaling.original_length if model.rope_scaling.type == "dynamic" else None
