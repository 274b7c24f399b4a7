"""Releases of pins: each node is told its newest one until it says that it has heard.

An agent that is frozen, or a message that is lost, would else keep slots pinned until the next commit. The
newest release of a node stands for all before it, so those are not told any more. A coordinator that begins
is told of every pin that is left, and releases it anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from picotron_ray.coordinator.append_queue import backoff
from picotron_ray.coordinator.messages import Release
from picotron_ray.runtime.ray_cluster.ray_calls import NO_ANSWER, is_dead, refusal

log = logging.getLogger(__name__)


class Releases:
    """Releases that are not acknowledged, one for each node; lives on the coordinator's loop."""

    def __init__(self, call_agent: Callable[..., Awaitable[Any]], going: Callable[[], bool]) -> None:
        """
        Args:
            call_agent: calls a method of a node's agent, as ``Cluster.call_agent`` does.
            going: whether anything is still to be told.
        """
        self._call_agent, self._going = call_agent, going
        self._open: dict[str, Release] = {}

    async def tell(self, term: int, command: Release) -> None:
        """Tell a release until it is acknowledged, or a newer one of its node takes its place.

        Raises:
            FencedError: the agent knows a newer term.
        """
        node, tries = command.node, 0
        self._open[node] = command
        generation = (command.generation.term, command.generation.n)
        keep = tuple((state.generation.term, state.generation.n, state.step) for state in command.keep)
        words = generation, command.step, keep, command.committed
        while self._going() and self._open.get(node) is command:
            try:
                await self._call_agent(node, "release", term, *words)
            except (RayError, TimeoutError) as error:
                if (refused := refusal(error)) is not None:
                    raise refused from error
                if is_dead(error):  # what it pinned is told of by the next agent there
                    break
                if not isinstance(error, NO_ANSWER):
                    log.warning("release on node %s: %s", node[:8], error)
                await asyncio.sleep(backoff(tries))
                tries += 1
            else:
                break
        if self._open.get(node) is command:
            del self._open[node]
