"""Config of a run's means to be debugged: records that it keeps."""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.schema.base import Section


class DebugConfig(Section):
    """Figures that each rank keeps for `picotron-ray debug`.

    Example::

        debug:
          record_operations: 2000
    """

    record_operations: int = Field(
        default=1000,
        ge=0,
        le=20_000,
        description="newest collectives, and point-to-point messages, that each rank keeps with their sizes,"
        " types and states, for `picotron-ray debug NAME deadlock`; 0: none. TORCH_FR_BUFFER_SIZE in the"
        " environment of the nodes goes before it, for collectives",
    )
