"""Sizes of gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from picotron_ray.models.decoder.sizes import (
    attention_sizes,
    decoder_sizes,
    mixture_sizes,
    with_one_block,
)
from picotron_ray.models.families.gpt_oss.table import parameter_table
from picotron_ray.models.sizes import ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def sizes(model: ModelConfig) -> ModelSizes:
    """Sizes by which layouts are judged.

    The clamped gate keeps its inputs and not its steps; it has 7 steps, which read and write 16 tensors.
    """
    shared, inner = mixture_sizes(model), model.moe.top_k * model.moe.intermediate_size
    return decoder_sizes(
        model,
        parameter_table(with_one_block(model)),
        attention_sizes(model),
        replace(
            shared, activations=shared.activations - inner, pointwise=shared.pointwise + (16 - 5) * inner
        ),
        rms_normed=2 * model.hidden_size,
    )
