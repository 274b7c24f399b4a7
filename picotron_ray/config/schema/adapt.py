"""Config of what a run may change of itself while it goes on."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from picotron_ray.config.schema.base import Section

AdaptKind = Literal[
    "micro-batch", "recompute", "schedule", "layout", "rows", "stages", "bucket", "precision", "compression"
]
"""Kinds of change, the one that is tried first where several promise as much."""
KINDS: tuple[AdaptKind, ...] = get_args(AdaptKind)
LOSSY: tuple[AdaptKind, ...] = ("precision", "compression")
"""Kinds that change the numbers of a step, rather than the order in which they are summed."""


class AdaptConfig(Section):
    """Adaptation of a run to what is measured of it, at step boundaries. The batch never changes.

    Example::

        adapt:
          apply: [micro-batch, recompute, rows, layout]
          interval_s: 60
          budget: 6
    """

    apply: tuple[AdaptKind, ...] = Field(
        default=(),
        description="kinds of change that may be made: micro-batch, recompute, schedule and layout release"
        " what the section layout names of them, which is then where the run starts; rows feeds replicas in"
        " proportion to their speed; stages cuts the pipeline by measured times; bucket; precision (bf16 for"
        " fp32) and compression (int8 gradients) change the numbers of a step",
    )
    interval_s: float = Field(
        default=60.0, gt=0, description="time between two looks at what was measured, at least"
    )
    budget: int = Field(default=6, ge=1, description="changes within an hour, at most")
    hysteresis: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="share of a step that a change must promise to save; one that brings neither this nor a"
        " quarter of its promise is taken back",
    )
    settle_steps: int = Field(
        default=20, ge=1, description="measured steps of a changed generation before it is judged"
    )
