"""Words of a member on the generation that it leaves, as the coordinator's machine knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator.codec import decode_divergence
from picotron_ray.coordinator.messages import ExpertLoads, OutcomeKind, Source
from picotron_ray.errors import CorruptError, DivergedError, NumericsError, SlotUnreachableError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.worker.memory_limit import out_of_memory
from picotron_ray.train.engine import Engine


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
    if isinstance(error, DivergedError):
        return FailureKind.DIVERGED, str(error)
    if interrupted:
        return "interrupted", ""
    if out_of_memory(error):
        return FailureKind.FAILED, f"oom: {error}"
    if lost_peer(error):
        return FailureKind.PEER_LOST, str(error)[:200]
    return FailureKind.FAILED, f"error: {type(error).__name__}: {error}"


def facts_of(error: Exception) -> dict[str, Any]:
    """Return what an outcome says of an error besides its words, by the outcome's fields."""
    if isinstance(error, NumericsError):
        return {"bad_step": error.bad_step, "bad_reason": error.reason}
    if isinstance(error, DivergedError):
        found = decode_divergence(error.found)
        return {"divergence": found, "bad_step": found.step}
    return {}


def loads_told(engine: Engine | None, layout: Layout, rank: int) -> tuple[ExpertLoads, ...]:
    """Return the loads of experts in this rank's layers; nothing where others of its stage tell them.

    The first and the last replica do: where one is lost with its node, the other is elsewhere, as a rule.
    """
    teller = layout.replica(rank) in (0, layout.replicas - 1) and not layout.coordinates(rank).tp
    if engine is None or not teller:
        return ()
    return tuple(ExpertLoads(*told) for told in engine.expert_balance.recent().items())
