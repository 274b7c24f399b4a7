"""Sizes of Gemma 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder.sizes import both_norms_sizes
from picotron_ray.models.families.gemma2.table import parameter_table
from picotron_ray.models.sizes import ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def sizes(model: ModelConfig) -> ModelSizes:
    """Sizes by which layouts are judged."""
    return both_norms_sizes(model, parameter_table, normed=0)
