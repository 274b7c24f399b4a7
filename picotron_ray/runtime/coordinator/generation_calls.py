"""Calls that run a generation: of each member, or in a large one of each node, whose agent calls its members.

A call of an actor costs the coordinator a good part of a millisecond, its answer included, so 16,000 members
would take it seconds to start and as long to hear. Few members are each called, which is the shortest way; of
more than ``FEW`` each node's agent is asked (``runtime.node_agent.member_calls``).

No generation depends on an agent for that. Where an agent dies, fails, or is silent, its node's members are
called directly, which joins what runs; so nothing is lost between the agent's last answer and its death.
Once it answers again the node is its own again: what was called directly is heard of either way, and nothing
more is. Where thousands are silent at once it is rather the coordinator that was cut off, so direct calls are
made some hundreds at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import RayError

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.call_turns import CallTurns
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.run_actors import FEW
from picotron_ray.runtime.ray_cluster.ray_calls import error_line, refusal
from picotron_ray.runtime.worker.member_call import MemberEnd, member_end

log = logging.getLogger(__name__)
WATCH_S = 1.0
AGAIN_S = 5.0  # after an agent's error, until it is asked again; twice as long after each
MOST_AGAIN_S = 80.0
DIRECT_CALLS = 1024  # begun within ``WATCH_S`` at most; they take half of the coordinator's time
SLEPT_S = 2.0  # a look that comes so late says that this process stood still, not the agents


@dataclass(slots=True)
class Part:
    """Members of a generation on one node; ``left``: those whose end is not known."""

    node: str
    left: dict[str, None]
    direct: bool = False  # they are called without the agent
    asked: bool = False  # a call of the agent is open
    called: set[str] = field(default_factory=set)  # direct calls are open, or wait for their turn
    again_at: float = 0.0  # when the agent may be asked again, after it failed
    again_s: float = field(default_factory=lambda: AGAIN_S)


@dataclass(slots=True)
class Running:
    """A generation that is being run; ``spec``: Ray's reference to it, where it is large."""

    id: m.GenerationId
    term: int
    spec: Any
    store: tuple[str, int] | None
    parts: list[Part] = field(default_factory=list)
    large: bool = False  # its nodes' agents are called


class GenerationCalls:
    """Calls of all generations of a term; ends are reported as events, each member's once."""

    def __init__(
        self,
        cluster: Cluster,
        report: Callable[[m.Event], object],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        going: Callable[[], bool],
    ) -> None:
        """
        Args:
            spawn: runs a task, and hears of its error.
            going: whether the coordinator still has a run to run.
        """
        self._cluster, self._report, self._spawn, self._going = cluster, report, spawn, going
        self._turns = CallTurns(DIRECT_CALLS, WATCH_S)

    async def run(self, term: int, spec: m.GenerationSpec, store: tuple[str, int] | None, home: str) -> None:
        """Start all members, or join them; of a large generation, until all have ended.

        Args:
            store: address of the rendezvous store; None: there is none, so only what runs already is joined,
                and the node ``home``, which was asked for one, counts as lost (empty: none does).
        """
        running = Running(spec.id, term, self._cluster.shared(spec), store)
        parts: dict[str, Part] = {}
        for member in spec.members:
            if store is not None or member.node != home:
                parts.setdefault(member.node, Part(member.node, {})).left[member.worker] = None
        running.parts = list(parts.values())
        running.large = len(spec.members) > FEW
        for part in running.parts:
            if running.large:
                self._spawn(self._run_part(running, part))
            else:
                self._call_directly(running, part)
        if running.large:
            await self._watch(running)

    async def _run_part(self, running: Running, part: Part) -> None:
        """Have an agent run its node's members until all have ended."""
        if part.asked:
            return  # its answer goes on with the rest
        part.asked = True
        try:
            await self._ask_agent(running, part)
        finally:
            part.asked = False

    async def _ask_agent(self, running: Running, part: Part) -> None:
        generation = (running.id.term, running.id.n)
        while part.left and not part.direct and self._going():
            order = running.term, generation, [running.spec], running.store, list(part.left)
            try:
                ends = await self._cluster.call_agent(
                    part.node, "run_generation", *order, timeout_s=None, patience_s=0.0
                )
            except (RayError, TimeoutError) as error:
                if (refused := refusal(error)) is not None:
                    raise refused from error
                log.info("agent of node %s: %s; its members are called", part.node[:8], error_line(error))
                part.again_at = asyncio.get_running_loop().time() + part.again_s
                part.again_s = min(MOST_AGAIN_S, 2 * part.again_s)
                self._call_directly(running, part)
                return
            part.again_s, part.direct = AGAIN_S, False  # silent or not, it answers
            if not ends:  # it was asked for a newer generation
                part.left.clear()
            for end in ends:
                self._ended(part, end)

    def _call_directly(self, running: Running, part: Part) -> None:
        if part.direct:
            return
        part.direct = True
        for worker in part.left:
            if worker not in part.called:
                part.called.add(worker)
                self._spawn(self._run_member(running, part, worker))

    async def _run_member(self, running: Running, part: Part, worker: str) -> None:
        try:
            if running.large:
                await self._turns.take()
            await self._call_member(running, part, worker)
        finally:
            part.called.discard(worker)

    async def _call_member(self, running: Running, part: Part, worker: str) -> None:
        def going() -> bool:
            return self._going() and part.direct and worker in part.left

        arguments = running.term, running.spec, running.store
        call = partial(self._cluster.call_worker, worker, "run_generation", *arguments, timeout_s=None)
        end = await member_end(worker, running.id, call, going)
        if end is not None:
            self._ended(part, end)

    def _ended(self, part: Part, end: MemberEnd) -> None:
        if end.worker in part.left:  # else the other way was faster
            del part.left[end.worker]
            self._report(end)

    async def _watch(self, running: Running) -> None:
        """Call the members of nodes whose agents are silent, and the agents again that are not any more."""
        clock = asyncio.get_running_loop().time
        while self._going() and any(part.left for part in running.parts):
            before = clock()
            await asyncio.sleep(WATCH_S)
            if clock() - before > WATCH_S + SLEPT_S:
                continue
            for part in running.parts:
                if part.left:
                    self._look(running, part, clock())

    def _look(self, running: Running, part: Part, now: float) -> None:
        silent = self._cluster.is_silent(part.node)
        if silent and not part.direct:
            log.info("agent of node %s is silent; its members are called", part.node[:8])
            self._call_directly(running, part)
        elif part.direct and not silent and now >= part.again_at:
            log.info("agent of node %s answers; it calls its members", part.node[:8])
            part.direct = False
            if not part.asked:
                self._spawn(self._run_part(running, part))
