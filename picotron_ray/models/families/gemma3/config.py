"""Rules of a config with ``model.family=gemma3``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import mixed_windows, unlearned_positions, untaken

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

UNTAKEN = ("qkv_bias", "partial_rotary_factor", "attention_softcap", "moe")


def rules(model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
    """Mistakes in the ``model`` section."""
    yield from unlearned_positions(model)
    yield from untaken(model, UNTAKEN)
    yield from mixed_windows(model)
    if model.qk_norm:
        text = "saw true with model.family=gemma3, which norms q and k anyway; drop it"
        yield Problem("model.qk_norm", text, ("model.family",))
    if model.sliding_window is not None and model.rope_local_theta is None:
        text = "saw nothing with model.sliding_window, expected the rotary base of blocks with a window"
        yield Problem(
            "model.rope_local_theta", f"{text} (10000 in published models)", ("model.sliding_window",)
        )
    if model.sliding_window is None and model.rope_local_theta is not None:
        text = (
            f"saw {model.rope_local_theta:g} without model.sliding_window, so that no block has it; drop it"
        )
        yield Problem("model.rope_local_theta", text, ("model.sliding_window",))
