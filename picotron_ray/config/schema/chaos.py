"""Config of scripted faults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section

FaultName = Literal[
    "kill",
    "stop",
    "hang",
    "slow",
    "slow-data",
    "nan",
    "scale",
    "scale-gradients",
    "leak",
    "flip",
    "remove-node",
]
FaultTarget = Literal["worker", "node", "coordinator"]
FAULT_TARGETS: dict[FaultName, tuple[FaultTarget, ...]] = {
    "kill": ("worker", "coordinator"),
    "stop": ("worker", "coordinator"),
    "hang": ("worker", "coordinator"),
    "slow": ("worker",),
    "slow-data": ("worker",),
    "nan": ("worker",),
    "scale": ("worker",),
    "scale-gradients": ("worker",),
    "leak": ("worker",),
    "flip": ("worker",),
    "remove-node": ("node",),
}
"""Scripted faults and their possible targets; each is a class in ``runtime.chaos.faults``."""
FAULT_STRENGTHS: dict[FaultName, str] = {
    "slow": "row_s",
    "slow-data": "row_s",
    "scale": "factor",
    "scale-gradients": "factor",
    "leak": "pass_bytes",
}
"""Faults that say how much, by a key of their own."""


class ChaosFault(Section):
    """Scripted fault, for tests, demos and drills.

    Example::

        chaos:
          - fault: kill
            target: worker:2
            step: 100
    """

    fault: FaultName = Field(
        description="kill: SIGKILL; stop: SIGSTOP; hang: a thread that never returns; slow: a process that"
        " sleeps for every row that it computes, as long as it lives; slow-data: one whose data comes late;"
        " nan: one forward pass that is not a number; scale, scale-gradients: a process whose outputs, or"
        " their gradients, are multiplied; leak: one that keeps memory; flip: one bit of a weight that turns"
        " over; remove-node: the whole node"
    )
    target: str = Field(
        description="worker:<rank> of the running generation, node:<index>, or coordinator",
        pattern=r"^(worker:\d+|node:\d+|coordinator)$",
    )
    step: int = Field(ge=1, description="optimizer step (1-based) at which it strikes, once per run")
    phase: str = Field(default="forward", description="phase of the step, by its name in the heartbeat page")
    row_s: float | None = Field(
        default=None,
        ge=0,
        le=60,
        description="slow: seconds slept per row through the whole model, of which a pipeline stage takes the"
        " share of its blocks; slow-data: seconds by which a row comes late; 0: as fast as before",
    )
    factor: float | None = Field(
        default=None, description="scale, scale-gradients: multiplies from now on; 1: as before"
    )
    pass_bytes: int | None = Field(
        default=None,
        ge=0,
        le=2**32,
        description="leak: bytes kept at each forward pass; 0: no more, and what was kept is given back",
    )
