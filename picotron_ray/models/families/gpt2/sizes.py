"""Sizes of GPT-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder.sizes import (
    HiddenLayerSizes,
    attention_sizes,
    decoder_sizes,
    with_one_block,
)
from picotron_ray.models.families.gpt2.table import parameter_table
from picotron_ray.models.sizes import ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def sizes(model: ModelConfig) -> ModelSizes:
    """Sizes by which layouts are judged."""
    inner = model.intermediate_size
    # Of the hidden layer up and its activation are kept; GELU reads and writes.
    gelu = HiddenLayerSizes(2 * inner, inner + model.hidden_size, 2 * inner, inner, fused=0)
    return decoder_sizes(
        model,
        parameter_table(with_one_block(model)),
        attention_sizes(model),
        gelu,
        rms_normed=0,
    )
