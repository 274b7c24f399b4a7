"""Config of how a worker's memory is allocated, accounted and watched."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section

MEMORY_CLASSES = ("weights", "gradient", "optimizer", "activation", "temporary")
"""Classes of a worker's memory; `parallel.memory.trace` says which is what."""


class MemoryConfig(Section):
    """Memory of a worker's device.

    Example::

        memory:
          allocator: adaptive
          interval_steps: 50
    """

    allocator: Literal["auto", "adaptive", "first-fit", "best-fit"] = Field(
        default="auto",
        description="strategy of torch's CUDA allocator: auto, as torch and its environment variable say;"
        " best-fit, what torch does by default (the smallest free block that is large enough); adaptive,"
        " segments that grow, and cached blocks given back above 80 % of the device; first-fit is refused, as"
        " torch has none",
    )
    preallocate: bool = Field(
        default=False,
        description="on CUDA: gradient buckets and optimizer state in memory pools of their own, filled at"
        " the start of every generation as the planner estimates, corrected by what earlier ones took",
    )
    account: bool = Field(
        default=True,
        description="account the second step of every generation by class (weights, gradients, optimizer,"
        " activations, temporaries), to the byte; not where code is compiled or a graph replayed",
    )
    interval_steps: int = Field(
        default=100,
        ge=1,
        description="steps between two looks at the allocator, at which cached memory may be released and"
        " garbage collected",
    )
