"""Judgement of the error that ended a generation, in the words that the coordinator's machine knows."""

from __future__ import annotations

from collections.abc import Callable

from picotron_ray.coordinator.messages import OutcomeKind, Source
from picotron_ray.errors import CorruptError, NumericsError, SlotUnreachableError
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.worker.memory_limit import out_of_memory


def judge(
    error: Exception, source: Source, interrupted: bool, lost_peer: Callable[[Exception], bool]
) -> tuple[OutcomeKind, str]:
    """Kind and detail of the outcome that an error means.

    Args:
        source: of the generation's state.
        interrupted: the member was told to leave.
        lost_peer: tells whether the process groups raised it for a peer that is gone.
    """
    if isinstance(error, CorruptError):
        return FailureKind.FAILED, f"corrupt:{error.where if source.kind == 'slots' else source.manifest}"
    if isinstance(error, SlotUnreachableError):
        return FailureKind.FAILED, f"unreachable:{error.where}"
    if isinstance(error, NumericsError):
        return FailureKind.NUMERICS, str(error)
    if interrupted:
        return "interrupted", ""
    if out_of_memory(error):
        return FailureKind.FAILED, f"oom: {error}"
    if lost_peer(error):
        return FailureKind.PEER_LOST, str(error)[:200]
    return FailureKind.FAILED, f"error: {type(error).__name__}: {error}"
