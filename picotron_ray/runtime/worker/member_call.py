"""Call of a worker for one whole generation, and the event that its end means to the coordinator's machine.

The coordinator makes it, or a node's agent for it; both ask and judge alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray.exceptions import OutOfMemoryError, RayError

from picotron_ray.coordinator.messages import GenerationId, Outcome, WorkerExited
from picotron_ray.coordinator.out_of_memory import OOM
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.ray_cluster.ray_calls import (
    NO_ANSWER,
    UNAVAILABLE_RETRY_S,
    error_line,
    is_dead,
    refusal,
)

MemberEnd = Outcome | WorkerExited


async def member_end(
    worker: str,
    generation: GenerationId,
    call: Callable[[], Awaitable[Outcome | None]],
    going: Callable[[], bool] = lambda: True,
) -> MemberEnd | None:
    """Await the end of a member's generation; a lost reply is asked for again, because a second call joins.

    Args:
        call: calls ``run_generation`` of the worker; its answer None says to ask again.
        going: whether the end is still asked for; where it is not, None is returned instead of another call.

    Raises:
        FencedError: the worker knows a newer term.
    """
    while going():
        try:
            answer = await call()
            if answer is not None:
                return answer
        except NO_ANSWER:
            pass
        except RayError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            return _meaning(worker, generation, error)
        await asyncio.sleep(UNAVAILABLE_RETRY_S)
    return None


def _meaning(worker: str, generation: GenerationId, error: RayError) -> MemberEnd:
    """Return what an error of the call says of the worker."""
    if isinstance(error, OutOfMemoryError):
        return WorkerExited(worker, f"{OOM}: killed by Ray, whose node ran low on memory")
    if is_dead(error):
        return WorkerExited(worker, "process died")
    return Outcome(worker, generation, FailureKind.FAILED, -1, f"error: {error_line(error)}")
