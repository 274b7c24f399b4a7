"""Rules of a config with ``model.family=gpt2``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import untaken

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

UNTAKEN = ("head_dim", "qkv_bias", "qk_norm", "sliding_window", "rope_scaling", "rope_theta", "moe")


def rules(model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
    """Mistakes in the ``model`` section."""
    yield from untaken(model, UNTAKEN)
    if model.kv_heads != model.heads:
        text = f"saw {model.kv_heads} with model.family=gpt2, expected model.heads={model.heads}"
        yield Problem("model.kv_heads", text, ("model.heads", "model.family"))
    if model.max_positions is None or model.max_positions < sequence_length:
        saw = "nothing" if model.max_positions is None else model.max_positions
        text = f"saw {saw} with model.family=gpt2, expected at least data.sequence_length={sequence_length}"
        yield Problem("model.max_positions", text, ("data.sequence_length", "model.family"))
