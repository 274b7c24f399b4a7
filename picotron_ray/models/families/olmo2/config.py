"""Rules of a config with ``model.family=olmo2``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import unlearned_positions, untaken

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

UNTAKEN = ("head_dim", "qkv_bias", "sliding_window", "moe")


def rules(model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
    """Mistakes in the ``model`` section."""
    yield from unlearned_positions(model)
    yield from untaken(model, UNTAKEN)
    if model.qk_norm:
        text = "saw true with model.family=olmo2, which norms q and k over their whole width anyway; drop it"
        yield Problem("model.qk_norm", text, ("model.family",))
