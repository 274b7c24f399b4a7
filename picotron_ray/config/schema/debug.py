"""Config of a run's means to be debugged: records that it keeps, and checks of its own results."""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.schema.base import Section


class DebugConfig(Section):
    """Records that each rank keeps for `picotron-ray debug`, and checks of a run's own results.

    Example::

        debug:
          record_operations: 2000
          replica_check_steps: 100
    """

    record_operations: int = Field(
        default=1000,
        ge=0,
        le=20_000,
        description="newest collectives, and point-to-point messages, that each rank keeps with their sizes,"
        " types and states, for `picotron-ray debug NAME deadlock`; 0: none. TORCH_FR_BUFFER_SIZE in the"
        " environment of the nodes goes before it, for collectives",
    )

    replica_check_steps: int = Field(
        default=0,
        ge=0,
        description="steps between comparisons of what several ranks hold alike (weights and moments, bit by"
        " bit), which find silent corruption; best a divisor of checkpoint.interval_steps; 0: none",
    )

    attach: bool = Field(
        default=False,
        description="whether `picotron-ray debug NAME attach` may attach debugpy to a rank: whoever may give"
        " the run orders can then run any code in it",
    )
