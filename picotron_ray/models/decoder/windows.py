"""Blocks of two kinds: most see a window of tokens, every so many all before them. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def sees_whole_row(model: ModelConfig, layer: int) -> bool:
    """Whether a token of a block, by its absolute number, sees all tokens before it."""
    every = model.full_attention_every
    return model.sliding_window is None or (every is not None and (layer + 1) % every == 0)
