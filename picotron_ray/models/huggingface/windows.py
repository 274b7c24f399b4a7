"""Windows in config.json, where blocks with and without one take turns. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from picotron_ray.models.decoder.windows import sees_whole_row
from picotron_ray.models.huggingface.config_reader import Keys, refuse

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def window_keys(keys: Keys, layers: int, every: int) -> dict[str, Any]:
    """The window, and which blocks have it. Raises ConfigError where they do not alternate evenly.

    Args:
        every: so many blocks one sees whole rows, where ``layer_types`` is absent.
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise refuse("layer_types", kinds, f"a list of {layers} times {SLIDING} or {FULL}")
    if set(kinds) == {FULL}:
        return {}
    step = kinds.index(FULL) + 1 if FULL in kinds else None
    for layer, kind in enumerate(kinds):
        built = FULL if step and (layer + 1) % step == 0 else SLIDING
        if kind != built:
            evenly = f": one of every {step} blocks is {FULL}" if step else ""
            raise refuse(f"layer_types.{layer}", kind, f"{built}{evenly}")
    return {
        "sliding_window": keys.whole("sliding_window"),
        **({"full_attention_every": step} if step else {}),
    }


def layer_types(model: ModelConfig) -> list[str]:
    """The kind of each block, as config.json has it."""
    return [FULL if sees_whole_row(model, layer) else SLIDING for layer in range(model.layers)]
