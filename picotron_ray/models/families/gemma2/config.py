"""Rules of a config with ``model.family=gemma2``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import mixed_windows, unlearned_positions, untaken

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

UNTAKEN = ("qkv_bias", "qk_norm", "partial_rotary_factor", "rope_local_theta", "moe")


def rules(model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
    """Mistakes in the ``model`` section."""
    yield from unlearned_positions(model)
    yield from untaken(model, UNTAKEN)
    yield from mixed_windows(model)
