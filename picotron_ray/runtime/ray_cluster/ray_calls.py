"""Calls of agents and workers: what their errors say.

No answer (a deadline passed, or Ray says "unavailable") means that nothing is known. A refusal that names a
newer term means that another coordinator has taken over. Only a dead actor is gone, and any other error is
the callee's own: it may do better when it is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.errors import FencedError, UnmarkedError
from picotron_ray.runtime.ray_cluster.names import NAMESPACE

log = logging.getLogger(__name__)
SELF_S = 10.0
"""Longest wait for an actor to say which process it is."""
CALL_S = 60.0
"""Longest wait for the answer to a call whose work is done at once."""
AGENT_BACK_S = 15.0
"""Longest wait of a call for an agent whose process is being started again."""
UNAVAILABLE_RETRY_S = 0.2
NO_ANSWER = (ActorUnavailableError, TimeoutError)


async def answer(reference: Any, timeout_s: float | None = None) -> Any:
    """Await a Ray call from any event loop.

    Raises:
        TimeoutError: no answer came in time; the call may have been carried out.
    """
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)


async def answer_when_back(call: Callable[[], Any], timeout_s: float | None, patience_s: float) -> Any:
    """Await a call, made again for up to ``patience_s`` while the actor's process is being started again.

    Raises:
        ActorUnavailableError: it was not started again in time.
        TimeoutError: no answer came in time; the call may have been carried out.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            return await answer(call(), timeout_s)
        except ActorUnavailableError:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(UNAVAILABLE_RETRY_S)


def refusal(error: BaseException) -> FencedError | None:
    """Return the refusal that an error of a call stands for, where a newer term is why.

    Ray raises an error that is a FencedError too, and whose text is a traceback: its cause says why.
    """
    for refused in (getattr(error, "cause", None), error):
        if isinstance(refused, FencedError):
            return refused
    return None


def unmarked(error: BaseException) -> UnmarkedError | None:
    """Return what an agent says of slots that it could not mark as kept; None: this is no such error."""
    cause = error if isinstance(error, UnmarkedError) else getattr(error, "cause", None)
    return cause if isinstance(cause, UnmarkedError) else None


def error_line(error: BaseException) -> str:
    """Last line of what an error says."""
    text = str(error).strip()
    return text.splitlines()[-1][:300] if text else type(error).__name__


def is_dead(error: BaseException) -> bool:
    """Whether an error says that the actor is gone for good."""
    return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)


async def ask_all(
    handles: Mapping[str, ActorHandle],
    method: str,
    timeout_s: float,
    *arguments: Any,
    patience_s: float = 0.0,
    turn: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Any]:
    """Call the agents of many nodes at once; by node, what each answers, or its error.

    Args:
        turn: awaited before each call, so that thousands of them do not hold up the loop.
    """

    async def asked(handle: ActorHandle) -> Any:
        if turn is not None:
            await turn()
        call = getattr(handle, method).remote
        return await answer_when_back(lambda: call(*arguments), timeout_s, patience_s)

    calls = [asked(handle) for handle in handles.values()]
    return dict(zip(handles, await asyncio.gather(*calls, return_exceptions=True), strict=True))


async def is_this_process(name: str) -> bool:
    """Whether this process is what Ray calls by an actor's name; no answer says no.

    Args:
        name: of an actor that has a method ``pid``.
    """
    try:
        found = ray.get_actor(name, NAMESPACE)
        return bool(await answer(found.pid.remote(), SELF_S) == os.getpid())
    except (RayError, ValueError, TimeoutError) as error:
        log.warning("which process is %s is not known: %s", name, error)
        return False
