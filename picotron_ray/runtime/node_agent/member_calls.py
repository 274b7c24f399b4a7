"""Calls of a generation's members on one node, made by its agent for the coordinator.

The coordinator asks once for all members of the node and is answered with the first ends; those that follow
at once come with them. It then asks again for the members that are left. Nothing is kept for it: a worker
repeats its outcome to whoever asks, so an agent's next process, or the coordinator itself, finds the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from picotron_ray.coordinator.messages import GenerationId
from picotron_ray.runtime.ray_cluster.ray_calls import answer
from picotron_ray.runtime.worker.member_call import MemberEnd, member_end

TOGETHER_S = 0.02
"""Time from a node's first end to the answer: members that are told to leave together end together."""
CLOSE_S = 2.0
Order = tuple[int, GenerationId]  # term of the coordinator that asks, and the generation


class MemberCalls:
    """Calls of the newest generation that the agent was asked to run; any thread may ask."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        """
        Args:
            find: returns a worker's handle by its name; an error of it is the caller's.
        """
        self._find = find
        self._loop = asyncio.new_event_loop()
        self._order: Order = (0, GenerationId(0, 0))
        self._ends: dict[str, asyncio.Task[MemberEnd | None]] = {}
        self._newer = self._loop.create_future()  # done once somebody asks again
        self._thread = threading.Thread(target=self._loop.run_forever, name="members", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call and answer nobody any more; whoever waits is told so by an error."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop)
        self._thread.join(timeout=CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()

    def run(
        self, order: Order, spec: Any, store: tuple[str, int] | None, workers: Sequence[str]
    ) -> list[MemberEnd]:
        """Run members, or join them; returns the ends of at least one, or none where somebody asked again.

        Args:
            spec: the generation's spec, or Ray's reference to it.
            store: address of the rendezvous store, None: only what runs already is joined.
        """
        handles = {worker: self._find(worker) for worker in workers}
        work = self._run(order, spec, store, handles)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(
        self, order: Order, spec: Any, store: tuple[str, int] | None, handles: dict[str, Any]
    ) -> list[MemberEnd]:
        if order < self._order:
            return []
        if order != self._order:  # calls in the name of an older term would not fence it off
            self._order, self._ends = order, {}
        self._newer.cancel()
        self._newer = newer = self._loop.create_future()
        for worker, handle in handles.items():
            if worker not in self._ends:
                self._ends[worker] = asyncio.create_task(self._called(worker, handle, order, spec, store))
        ends = [self._ends[worker] for worker in handles]
        await asyncio.wait([*ends, newer], return_when=asyncio.FIRST_COMPLETED)
        if newer.done():
            return []
        await asyncio.wait(ends, timeout=TOGETHER_S)
        return [end for task in ends if task.done() and (end := task.result()) is not None]

    async def _called(
        self, worker: str, handle: Any, order: Order, spec: Any, store: tuple[str, int] | None
    ) -> MemberEnd | None:
        term, generation = order

        def call() -> Any:
            return answer(handle.run_generation.remote(term, spec, store))

        return await member_end(worker, generation, call, lambda: self._order == order)
