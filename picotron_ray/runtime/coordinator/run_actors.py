"""Actors of a run: handles of its agents and workers, calls of them, and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.coordinator.policies.store_home import StoreHomes, asked_s
from picotron_ray.errors import FencedError
from picotron_ray.runtime.coordinator.by_node import ByNode
from picotron_ray.runtime.coordinator.call_turns import CallTurns
from picotron_ray.runtime.node_agent.folder_guard import PUT_OFF
from picotron_ray.runtime.ray_cluster import kept_slots
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, worker_actor_name
from picotron_ray.runtime.ray_cluster.ray_calls import (
    AGENT_BACK_S,
    CALL_S,
    answer,
    answer_when_back,
    ask_all,
    error_line,
    is_dead,
    refusal,
    unmarked,
)

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0
EVIDENCE_S = 1.5
FEW = 64  # workers that are each called; more of them are told by way of their nodes' agents
CALLS_A_TURN = 16
STARTS_A_TURN = 2  # Ray is asked for a name before the call returns
LOOKUPS = 4  # of names at a time, each in a thread
STARTS = 4  # of actors at a time, likewise
IsNewest = Callable[[], Awaitable[bool | None]]


class RunActors:
    """Agents by node and workers by name; each method may be called again after a lost reply."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._agents: dict[str, ActorHandle] = {}
        self._workers: dict[str, ActorHandle | None] = {}  # None: not called yet, or being started
        self._lookups = asyncio.Semaphore(LOOKUPS)
        self._node_of = ByNode()  # of workers that have a handle, or whose page was heard of last
        self._late: set[str] = set()  # workers that did not start in time, and may yet
        self._placed = ByNode()  # ready workers: they hold resources of their node
        self._stores = StoreHomes()
        self._calls, self._starts = CallTurns(CALLS_A_TURN), CallTurns(STARTS_A_TURN)
        self._starters = ThreadPoolExecutor(STARTS, thread_name_prefix="actor-start")
        self._closed = False

    async def _start(self, start: Callable[..., ActorHandle], *arguments: Any) -> ActorHandle:
        """Have an actor started off the loop, by threads that nothing else waits for.

        Ray's head is asked before the call returns: where it stands still, nothing else may.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._starters, partial(start, *arguments))

    def store_home(self, spec: GenerationSpec) -> str:
        """Return the node whose rendezvous store a generation is to use (`StoreHomes.home`)."""
        return self._stores.home(spec, self.is_silent)

    def is_silent(self, node: str) -> bool:
        """Whether an agent has said nothing for longer than between two heartbeats."""
        raise NotImplementedError

    async def store_address(self, home: str) -> tuple[str, int]:
        """Ask a node for the address of its rendezvous store; raises as ``call_agent`` does.

        All members wait for it, and another node may have one: it is not waited for as long as for a call
        that only its own node can answer.
        """
        limit_s = asked_s(self._job.elastic.node_timeout_s)
        try:
            call = self.call_agent(home, "store_address", timeout_s=limit_s, patience_s=limit_s)
            host, port, replaced = await asyncio.wait_for(call, limit_s)
        except (RayError, TimeoutError):
            self._stores.failed(home)
            raise
        self._stores.answered(home, replaced)
        return host, port

    def shared(self, spec: GenerationSpec) -> Any:
        """Return what stands for ``spec`` in the calls that run it.

        It names all members, so thousands of calls would each carry megabytes: a reference to one copy does.
        """
        return spec if len(spec.members) <= FEW else ray.put(spec)

    async def call_agent(
        self,
        node: str,
        method: str,
        *arguments: Any,
        timeout_s: float | None = CALL_S,
        patience_s: float = AGENT_BACK_S,
    ) -> Any:
        """Call the agent of a node, which may be told twice.

        Raises:
            RayActorError: it is gone, or was not started again within ``patience_s``.
            RayError: it failed, or refused (``ray_calls.refusal``).
            TimeoutError: it did not answer in time.
        """

        def call() -> Any:
            handle = self._agents.get(node)  # looked up each time: the node may have got another
            if handle is None:
                raise RayActorError(error_msg=f"node {node[:8]} has no agent")
            return getattr(handle, method).remote(*arguments)

        await self._calls.take()
        return await answer_when_back(call, timeout_s, patience_s)

    async def call_worker(
        self, worker: str, method: str, *arguments: Any, timeout_s: float | None = CALL_S
    ) -> Any:
        """Call a worker; raises as ``call_agent`` does. ``timeout_s`` None: for as long as it lives."""
        await self._calls.take()
        handle = self._workers.get(worker)
        if handle is None and worker in self._workers:
            handle = await self._look_up(worker)
            if worker in self._workers:  # else it was ended meanwhile
                self._workers[worker] = handle
        if handle is None:
            raise RayActorError(error_msg=f"worker {worker} is gone")
        return await self._ask(handle, method, arguments, timeout_s)

    async def _ask_all(
        self,
        agents: Mapping[str, ActorHandle],
        method: str,
        timeout_s: float,
        *arguments: Any,
        patience_s: float = 0.0,
    ) -> dict[str, Any]:
        """Call many agents in turns; by node, what each answers, or its error."""
        turn = self._calls.take
        return await ask_all(agents, method, timeout_s, *arguments, patience_s=patience_s, turn=turn)

    async def _ask(
        self, handle: ActorHandle, method: str, arguments: tuple[Any, ...], timeout_s: float | None
    ) -> Any:
        return await answer(getattr(handle, method).remote(*arguments), timeout_s)

    def adopt_workers(self, members: tuple[Member, ...]) -> None:
        """Note workers that an earlier coordinator started, where they are not known yet.

        Ray is asked for the handle of each when it is first called: for thousands at once it takes seconds,
        and most of them are only ever called by their agents. One that Ray does not know then is gone.
        """
        for member in members:
            if member.worker not in self._workers:
                self._workers[member.worker] = None
                self._node_of[member.worker] = self._placed[member.worker] = member.node

    async def _look_up(self, worker: str) -> ActorHandle | None:
        """Ask Ray for a worker's handle, off the loop; None: it knows no such actor any more."""
        async with self._lookups:
            try:
                name = worker_actor_name(self._job.name, worker)
                return await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            except ValueError:
                log.warning("worker %s has no actor any more", worker)
                return None

    def note_workers(self, node: str, workers: Iterable[str]) -> None:
        """Note where workers live, as a heartbeat says: one that an earlier coordinator started is new."""
        told = set(workers)
        for worker in told:
            self._node_of.setdefault(worker, node)
        for worker in self._node_of.on(node):
            if worker not in told and worker not in self._workers:
                del self._node_of[worker]

    async def kill_worker(self, term: int, worker: str, is_newest: IsNewest) -> None:
        """Kill a worker by SIGKILL through its node's agent; through Ray where the agent does not answer.

        Args:
            is_newest: whether ``term`` is the log's newest, as storage says; None: it does not answer. Asked
                where no agent vouches for the term.

        Raises:
            FencedError: there is a newer term; nothing was killed.
        """
        handle, node = self._workers.get(worker), self._node_of.get(worker, "")
        unasked, returning = handle is None and worker in self._workers, False
        try:
            call = self.call_agent(node, "kill", term, worker, timeout_s=CLOSE_TIMEOUT_S, patience_s=0.0)
            killed = await call
            if killed == PUT_OFF:
                return  # its end is told once its slots are saved
            if not killed and unasked:  # its page may be all that is gone
                handle = await self._look_up(worker)
        except (RayError, TimeoutError) as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            log.debug("no agent to kill %s: %s", worker, error)
            newest = await is_newest()
            if newest is False:
                raise FencedError(f"the log holds a newer term than {term}") from error
            if newest is None and not is_dead(error):
                return  # nobody vouches for it: ordered again later
            returning = isinstance(error, ActorUnavailableError)
            if unasked:
                handle = await self._look_up(worker)
        self._late.discard(worker)
        self.gone(worker)
        if handle is not None:
            ray.kill(handle)  # takes seconds where the process is stopped: an agent that is back does not
        if returning:
            await self._kill_once_back(term, worker, node)

    async def _kill_once_back(self, term: int, worker: str, node: str) -> None:
        try:
            await self.call_agent(node, "kill", term, worker, timeout_s=CLOSE_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            log.warning("worker %s on node %s: no agent came back to kill it: %s", worker, node[:8], error)

    def gone(self, worker: str) -> None:
        """Forget a worker whose process has ended; of one that may yet come up its place alone."""
        self._placed.pop(worker, None)
        if worker not in self._late:
            self._workers.pop(worker, None)
            self._node_of.pop(worker, None)

    def node_of(self, worker: str) -> str:
        """Node of a worker; empty where it is not known."""
        return self._node_of.get(worker, "")

    def workers_on(self, node: str) -> list[str]:
        """Workers that were started on a node and not killed since."""
        return [worker for worker in self._node_of.on(node) if worker in self._workers]

    async def figures(self) -> dict[str, list[dict[str, Any]]]:
        """Ask for the pages of all living workers, by node, as they are now."""
        said = await self._ask_all(self._agents, "figures", CLOSE_TIMEOUT_S)
        for node, error in said.items():
            if isinstance(error, BaseException):
                log.debug("no figures from node %s: %s", node[:8], error)
        return {node: pages for node, pages in said.items() if not isinstance(pages, BaseException)}

    async def heard_term(self, patient: bool = True) -> int:
        """Return the newest term that the run's agents have heard of; 0: none says one.

        Args:
            patient: agents that are restarted meanwhile are waited for.
        """
        limit_s = CLOSE_TIMEOUT_S
        patience_s = limit_s if patient else 0.0
        said = await self._ask_all(self._agents, "newest_term", limit_s, patience_s=patience_s)
        return max((term for term in said.values() if isinstance(term, int)), default=0)

    async def evidence(self, generation: GenerationId, most_bytes: int, term: int) -> list[dict[str, Any]]:
        """Ask all nodes where the members of a generation are; an entry for each, or for a silent node."""
        which = (generation.term, generation.n)
        said = await self._ask_all(self._agents, "evidence", EVIDENCE_S, term, which, most_bytes)
        found: list[dict[str, Any]] = []
        for node, entries in said.items():
            if isinstance(entries, BaseException):
                found.append({"node": node, "problem": f"{type(entries).__name__}: {entries}"[:500]})
            else:
                found += [{"node": node, **entry} for entry in entries]
        return found

    async def close(self, term: int, keep: Source | None = None, finished: bool = True) -> dict[str, str]:
        """End every worker and agent of the run, and remove the nodes' folders, but the slots of ``keep``.

        Each agent ends what is on its node; Ray ends the actors of those that did, or that do not answer. An
        agent that cannot mark its slots as kept stays, and guards them.

        Args:
            finished: the run is done; else slots that are marked already stay too: they are not committed.

        Returns:
            By node, why it did not say that it keeps what it was to keep.

        Raises:
            FencedError: an agent knows a newer term: it and its workers were left alone.
        """
        self._closed = True
        key = kept_slots.key_of(keep, finished)
        workers = {node: self._workers_of(node) for node in self._agents}
        lost = {w: handle for w, handle in self._workers.items() if self._node_of[w] not in self._agents}
        errors = await self._close_nodes(term, key, dict(self._agents), workers)
        await self._kill_all(lost, ended=False)
        return {
            node: str(unmarked(why) or error_line(why)) for node, why in errors.items() if keep is not None
        }

    def _workers_of(self, node: str) -> dict[str, ActorHandle | None]:
        return {worker: self._workers[worker] for worker in self.workers_on(node)}

    async def _kill_all(self, workers: Mapping[str, ActorHandle | None], *, ended: bool) -> None:
        """Have Ray end workers; ``ended``: an agent did, so none is looked up for it."""
        for worker, handle in workers.items():
            found = handle if ended or handle is not None else await self._look_up(worker)
            if found is not None:
                ray.kill(found)

    async def _close_nodes(
        self,
        term: int,
        key: tuple[int, ...] | None,
        agents: Mapping[str, ActorHandle],
        workers: Mapping[str, Mapping[str, ActorHandle | None]],
        is_newest: IsNewest | None = None,
    ) -> dict[str, BaseException]:
        """Close nodes through their agents, and end the actors there, but where an agent refuses.

        Returns the errors of agents that did not say that they have closed.

        Args:
            is_newest: asked where an agent says nothing; None: it was asked before.
        """
        refusals, errors, closed = [], {}, list[str]()
        said_by = await self._ask_all(agents, "close", CLOSE_TIMEOUT_S, term, key, patience_s=CLOSE_TIMEOUT_S)
        for node, said in said_by.items():
            refused = refusal(said) if isinstance(said, BaseException) else None
            if refused is not None:
                refusals.append(refused)
                continue
            if isinstance(said, BaseException):
                log.debug("agent of node %s: %s", node[:8], said)
                errors[node] = said
                if is_newest is not None and not is_dead(said) and not await is_newest():
                    continue  # nobody vouches for the term: what is there may be a successor's
            await self._kill_all(workers[node], ended=not isinstance(said, BaseException))
            if node not in errors or unmarked(errors[node]) is None:  # else it is all that guards its slots
                ray.kill(agents[node])
                closed.append(node)
        for node in closed if refusals else ():
            if self._agents.get(node) is agents[node]:
                del self._agents[node]  # not to be asked again
        for refused in refusals:
            raise refused
        return errors
