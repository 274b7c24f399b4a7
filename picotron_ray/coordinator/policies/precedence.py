"""Precedence of concerns: which one is answered where several are found at once.

Workers, agents and the planner report findings. What is done about them (go back, shrink, evict, grow) is
decided by the coordinator alone, by this one table, earlier rows first:

========  ===============================================  ==============================================
concern   found                                            answered by
========  ===============================================  ==============================================
failure   a process, node or slot is gone, stuck or        the ladder of ``failures``: retry, replace,
          damaged, or a step raised                        older state, fewer workers
memory    a device or host ran out of memory               a layout that needs less
numerics  a step's numbers are not finite, or a spike;     left out, a rewind, or the end; a state from
          replicas differ                                  before, the wrong one's node moved off
order     an operator's stop, pause, resize, drain,       the same, at a step boundary; in a recovery it
          or the end of the launch's time                  is obeyed where that would launch
speed     a drain, room to grow, a plan that came late     another layout, at a step boundary
rule      what a rule over telemetry found, where          at a boundary: older weights (with numerics), a
          ``alerts.act`` names the rule                    node moved off, a checkpoint now (with speed)
adapt     a bottleneck: a straggler, too little memory     a change that ``adapt`` permits, at a boundary,
          left, waiting (its figures, rules of others)     measured, and kept or taken back
========  ===============================================  ==============================================

An earlier concern may be what caused a later one: the numbers of a failing device are not to be trusted, and
a layout that does not fit says nothing about the data. So the later one is dropped: the next generation finds
it again if it is still true. A rule's finding has the urgency of what it asks for (`concern_of_act`): it
waits for nothing, and is dropped where the generation is already ending.
"""

from __future__ import annotations

from enum import IntEnum

from picotron_ray.coordinator.messages.figures import RuleAct
from picotron_ray.failures import FailureKind


class Concern(IntEnum):
    """Subject of a finding, the most urgent first."""

    FAILURE = 0
    MEMORY = 1
    NUMERICS = 2
    ORDER = 3
    SPEED = 4
    ADAPTATION = 5


def concern_of(kind: FailureKind, cause: str = "") -> Concern:
    """Return the concern of a failure.

    Args:
        cause: the reporter's own word for it; ``oom`` is that of memory.
    """
    if kind in (FailureKind.NUMERICS, FailureKind.DIVERGED):
        return Concern.NUMERICS
    return Concern.MEMORY if cause.startswith("oom") else Concern.FAILURE


def concern_of_act(act: RuleAct) -> Concern:
    """Return the concern of what a rule's finding asks for."""
    return Concern.NUMERICS if act == "rewind" else Concern.SPEED


def goes_before(kind: FailureKind, cause: str, other: FailureKind, other_cause: str) -> bool:
    """Whether a failure is answered rather than the other one that was found before."""
    return concern_of(kind, cause) < concern_of(other, other_cause)
