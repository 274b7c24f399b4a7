"""Rules of config keys that families share. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


MIXED = (
    "full_attention_every",
    "query_pre_attn_scalar",
    "attention_softcap",
    "logit_softcap",
    "rope_local_theta",
)
"""Keys of Gemma alone."""


def untaken(model: ModelConfig, keys: Sequence[str]) -> Iterator[Problem]:
    """Keys with a value that a family has no use for."""
    for key in keys:
        if getattr(model, key) != type(model).model_fields[key].get_default(call_default_factory=True):
            text = f"saw a value with model.family={model.family}, which has none; drop it"
            yield Problem(f"model.{key}", text)


def unlatent(model: ModelConfig) -> Iterator[Problem]:
    """Keys of latent attention, and of dense blocks before mixtures, in a family without."""
    yield from untaken(model, ("mla",))
    if model.moe.first_dense_layers:
        saw = f"saw {model.moe.first_dense_layers} with model.family={model.family}"
        text = f"{saw}, whose blocks are alike; use model.family=deepseek, or drop it"
        yield Problem("model.moe.first_dense_layers", text, ("model.family",))


def unlearned_positions(model: ModelConfig) -> Iterator[Problem]:
    """Rows of a table of positions, where positions are rotary."""
    if model.max_positions is not None:
        saw = f"saw {model.max_positions} with model.family={model.family}"
        yield Problem("model.max_positions", f"{saw}, whose positions are rotary; drop it", ("model.family",))


def mixed_windows(model: ModelConfig) -> Iterator[Problem]:
    """Blocks that see whole rows, where all do."""
    every = model.full_attention_every
    if every is not None and model.sliding_window is None:
        text = f"saw {every} without model.sliding_window, so that every block sees whole rows; drop it"
        yield Problem("model.full_attention_every", text, ("model.sliding_window",))
