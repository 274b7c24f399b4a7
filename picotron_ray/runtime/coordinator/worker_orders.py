"""Orders to workers that need no answer: an interrupt, the step of a commit.

A call of an actor costs the caller about 0.3 ms, so to tell 16,000 workers to leave would take a coordinator
five seconds. What is ordered at once goes out together: to few workers directly, which is the shortest way;
to more than ``FEW`` in one call for each node, whose agent passes it on. Where an agent does not take it,
its workers are called directly.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from ray.exceptions import RayError

from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.run_actors import FEW
from picotron_ray.runtime.ray_cluster.ray_calls import refusal

AGENT_S = 5.0  # longest wait for an agent that passes orders on
Told = Callable[[str, Coroutine[Any, Any, Any]], None]


class WorkerOrders:
    """Orders of one turn of the coordinator's loop, sent at its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cluster: Cluster, told: Told) -> None:
        """``told``: awaits a call by name, and passes a newer term's refusal on."""
        self._loop, self._cluster, self._told = loop, cluster, told
        self._waiting: dict[tuple[str, tuple[Any, ...]], list[str]] = defaultdict(list)

    def give(self, worker: str, method: str, *arguments: Any) -> None:
        """Have a method of a worker called, the coordinator's term first among its arguments."""
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting[method, arguments].append(worker)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, defaultdict(list)
        for (method, arguments), workers in waiting.items():
            if len(workers) <= FEW:
                self._call(workers, method, arguments)
                continue
            by_node: dict[str, list[str]] = defaultdict(list)
            for worker in workers:
                by_node[self._cluster.node_of(worker)].append(worker)
            for node, there in by_node.items():
                self._told(f"{method} on node {node[:8]}", self._pass_on(node, there, method, arguments))

    def _call(self, workers: list[str], method: str, arguments: tuple[Any, ...]) -> None:
        for worker in workers:
            self._told(f"{method} of {worker}", self._cluster.call_worker(worker, method, *arguments))

    async def _pass_on(self, node: str, workers: list[str], method: str, arguments: tuple[Any, ...]) -> None:
        term, *rest = arguments
        try:
            await self._cluster.call_agent(
                node, "order", term, workers, method, rest, timeout_s=AGENT_S, patience_s=0.0
            )
        except (RayError, TimeoutError) as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            self._call(workers, method, arguments)
