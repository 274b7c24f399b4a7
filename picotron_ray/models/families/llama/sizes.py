"""Sizes of a Llama-style decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder.sizes import (
    attention_sizes,
    decoder_sizes,
    mixture_sizes,
    swiglu_sizes,
    with_one_block,
)
from picotron_ray.models.families.llama.table import parameter_table
from picotron_ray.models.sizes import ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def sizes(model: ModelConfig) -> ModelSizes:
    """Sizes by which layouts are judged."""
    return decoder_sizes(
        model,
        parameter_table(with_one_block(model)),
        attention_sizes(model),
        mixture_sizes(model) if model.moe.experts else swiglu_sizes(model),
        rms_normed=2 * model.hidden_size,
    )
