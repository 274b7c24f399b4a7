"""Rotary positions beyond the length that a model was first trained on."""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.section import Section


class RopeScaling(Section):
    """Llama 3's scaling (Dubey et al. 2024): slow frequencies are divided, fast ones left, a ramp between.

    A frequency whose wavelength is above ``original_length / low_frequency_factor`` tokens is divided by
    ``factor``, one below ``original_length / high_frequency_factor`` is left.
    """

    factor: float = Field(default=1.0, ge=1, description="divisor of slow frequencies; 1: no scaling")
    low_frequency_factor: float = Field(default=1.0, gt=0, description="where scaling is full")
    high_frequency_factor: float = Field(default=4.0, gt=0, description="where scaling begins")
    original_length: int = Field(default=8192, ge=1, description="tokens per row in the first training")
