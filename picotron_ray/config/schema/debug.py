"""Config of what looks for errors inside a run that goes on."""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.schema.base import Section


class DebugConfig(Section):
    """Checks of a run's own results while it goes on.

    Example::

        debug:
          replica_check_steps: 100
    """

    replica_check_steps: int = Field(
        default=0,
        ge=0,
        description="steps between comparisons of what several ranks hold alike (weights and moments, bit by"
        " bit), which find silent corruption; best a divisor of checkpoint.interval_steps; 0: none",
    )
