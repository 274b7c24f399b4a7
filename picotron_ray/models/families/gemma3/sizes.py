"""Sizes of Gemma 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder.sizes import both_norms_sizes
from picotron_ray.models.families.gemma3.table import parameter_table
from picotron_ray.models.sizes import ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def sizes(model: ModelConfig) -> ModelSizes:
    """Sizes by which layouts are judged."""
    return both_norms_sizes(model, parameter_table, normed=model.query_width + model.key_width)
