"""Kinds of failure, in one table: which of them explains the others, and what a repetition calls for.

A kind of failure is one member of ``FailureKind`` and one row of ``FAILURE_RULES``. Outcomes of workers, the
coordinator's policies, the record of a run and its metrics all use these members. The module knows nothing
of the project, so each of them may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """Kind of an interruption of training; the value is its one spelling in logs, metrics and summaries."""

    PEER_LOST = "peer-lost"  # a collective of this worker ended because another member is gone
    FAILED = "failed"  # the worker's own step raised
    CORRUPT = "corrupt"  # what the worker read does not match its digest
    LATE = "late"  # the worker did not stop with the others at a step boundary
    START_FAILED = "start-failed"  # a new worker did not come up
    NUMERICS = "numerics"  # loss, gradients or weights are not finite or spike: a rewind, or the end
    DIVERGED = "diverged"  # ranks hold different values of what they must hold alike: silent corruption
    WORKER_EXITED = "worker-exited"  # the worker's process is gone
    OUT_OF_MEMORY = "out-of-memory"  # an allocation failed, or the kernel or Ray killed the worker for memory
    HANG = "hang"  # a phase outlasted its limit, or an interrupt was not answered
    NODE_LOST = "node-lost"  # the node is gone with its workers and snapshots

    @classmethod
    def named(cls, text: str) -> FailureKind | None:
        """The kind that ``text`` names; None where it names none.

        Event logs of earlier versions spell it with spaces or underscores, so these are read too.
        """
        spelled = text.replace(" ", "-").replace("_", "-")
        return cls(spelled) if spelled in _VALUES else None


_VALUES = frozenset(kind.value for kind in FailureKind)


class Remedy(StrEnum):
    """Change to the next generation, in answer to failures that repeat."""

    RETRY = "retry"
    EXCLUDE = "exclude the suspect worker"
    COMMIT = "use the last commit"
    SHRINK = "use fewer workers"
    GIVE_UP = "give up"


LADDER = (Remedy.RETRY, Remedy.RETRY, Remedy.EXCLUDE, Remedy.COMMIT, Remedy.SHRINK)
"""Remedy by the number of failures in a row; the last one stays until the run is given up."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """Judgement of one kind of failure.

    Fields:
        reported_as: kind under which metrics and summaries count it.
        climbs: whether a repetition without progress climbs ``LADDER``. A kind that explains itself does
            not: losing a node, setting a corrupt snapshot aside, a bad step, or a layout struck for want of
            memory, says nothing against the workers.
    """

    reported_as: FailureKind
    climbs: bool = True


FAILURE_RULES: Mapping[FailureKind, FailureRule] = {
    FailureKind.PEER_LOST: FailureRule(FailureKind.PEER_LOST),
    FailureKind.FAILED: FailureRule(FailureKind.FAILED),
    FailureKind.CORRUPT: FailureRule(FailureKind.FAILED, climbs=False),
    FailureKind.LATE: FailureRule(FailureKind.FAILED),
    FailureKind.START_FAILED: FailureRule(FailureKind.FAILED),
    FailureKind.NUMERICS: FailureRule(FailureKind.NUMERICS, climbs=False),
    FailureKind.DIVERGED: FailureRule(FailureKind.DIVERGED),
    FailureKind.WORKER_EXITED: FailureRule(FailureKind.WORKER_EXITED),
    FailureKind.OUT_OF_MEMORY: FailureRule(FailureKind.OUT_OF_MEMORY, climbs=False),
    FailureKind.HANG: FailureRule(FailureKind.HANG),
    FailureKind.NODE_LOST: FailureRule(FailureKind.NODE_LOST, climbs=False),
}
"""All kinds, the least telling first.

Several signs of one failure arrive one by one, and the last row among them names it: a member loses its peer
because a process exited, and the process exited because the coordinator killed it for its hang.
"""

REPORTED = tuple(kind for kind, rule in FAILURE_RULES.items() if rule.reported_as is kind)
"""Kinds that metrics and summaries know, in the order of ``FAILURE_RULES``."""


def explains(kind: FailureKind, other: FailureKind) -> bool:
    """Whether a failure with signs of both kinds is one of ``kind``: it is further down the table."""
    order = list(FAILURE_RULES)
    return order.index(kind) > order.index(other)
