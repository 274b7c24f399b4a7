"""Sizes of OLMo-2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from picotron_ray.models.decoder.sizes import attention_sizes, decoder_sizes, swiglu_sizes, with_one_block
from picotron_ray.models.families.olmo2.table import parameter_table
from picotron_ray.models.sizes import ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def sizes(model: ModelConfig) -> ModelSizes:
    """Sizes by which layouts are judged."""
    normed = model.query_width + model.key_width
    shared = attention_sizes(model)  # two norms there too, of what comes out instead of what goes in
    attention = replace(
        shared,
        activations=shared.activations + normed,  # q and k before their norms and after
        pointwise=shared.pointwise + 2 * normed,
    )
    return decoder_sizes(
        model,
        parameter_table(with_one_block(model)),
        attention,
        swiglu_sizes(model),
        rms_normed=2 * model.hidden_size + normed,
    )
