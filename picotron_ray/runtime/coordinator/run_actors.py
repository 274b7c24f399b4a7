"""Actors of a run: handles of its agents and workers, calls of them, and their end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.errors import FencedError
from picotron_ray.runtime.coordinator.by_node import ByNode
from picotron_ray.runtime.coordinator.ray_calls import (
    AGENT_BACK_S,
    CALL_S,
    answer,
    answer_when_back,
    ask_all,
    is_dead,
    refusal,
)
from picotron_ray.runtime.ray_cluster import kept_slots
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, worker_actor_name

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0
EVIDENCE_S = 1.5
MOST_COPIES = 64  # members that each get a copy of their generation's spec
IsNewest = Callable[[], Awaitable[bool | None]]


class RunActors:
    """Agents by node and workers by name; each method may be called again after a lost reply."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._agents: dict[str, ActorHandle] = {}
        self._workers: dict[str, ActorHandle] = {}
        self._node_of = ByNode()
        self._placed = ByNode()  # ready workers: they hold resources of their node
        self._store_failures: Counter[str] = Counter()  # by node: stores that froze, or did not start

    def store_home(self, spec: GenerationSpec) -> str:
        """Return the node whose rendezvous store a generation is to use.

        It is the node of rank 0, unless its stores failed twice and another member's less often.
        """
        nodes = dict.fromkeys(member.node for member in spec.members)
        return min(nodes, key=lambda node: max(0, self._store_failures[node] - 1))

    async def store_address(self, home: str) -> tuple[str, int]:
        """Ask a node for the address of its rendezvous store; raises as ``call_agent`` does."""
        try:
            host, port, replaced = await self.call_agent(home, "store_address")
        except (RayError, TimeoutError):
            self._store_failures[home] += 1
            raise
        self._store_failures[home] = max(self._store_failures[home], replaced)
        return host, port

    def shared(self, spec: GenerationSpec) -> Any:
        """Return what stands for ``spec`` in calls of all its members.

        It names all of them, so thousands of calls would each carry megabytes: a reference to one copy does.
        """
        return spec if len(spec.members) <= MOST_COPIES else ray.put(spec)

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

        return await answer_when_back(call, timeout_s, patience_s)

    async def call_worker(
        self, worker: str, method: str, *arguments: Any, timeout_s: float | None = CALL_S
    ) -> Any:
        """Call a worker; raises as ``call_agent`` does. ``timeout_s`` None: for as long as it lives."""
        handle = self._workers.get(worker)
        if handle is None:
            raise RayActorError(error_msg=f"worker {worker} is gone")
        return await answer(getattr(handle, method).remote(*arguments), timeout_s)

    def adopt_workers(self, members: tuple[Member, ...]) -> None:
        """Find the handles of workers that an earlier coordinator started."""
        for member in members:
            self._node_of[member.worker] = member.node
            try:
                name = worker_actor_name(self._job.name, member.worker)
                self._workers[member.worker] = ray.get_actor(name, NAMESPACE)
                self._placed[member.worker] = member.node
            except ValueError:
                log.warning("worker %s has a page but no actor", member.worker)

    def note_workers(self, node: str, workers: Iterable[str]) -> None:
        """Note where workers live, as a heartbeat says: one that an earlier coordinator started is new."""
        for worker in workers:
            self._node_of.setdefault(worker, node)

    async def kill_worker(self, term: int, worker: str, is_newest: IsNewest) -> None:
        """Kill a worker by SIGKILL through its node's agent; through Ray where the agent does not answer.

        Args:
            is_newest: whether ``term`` is the log's newest, as storage says; None: it does not answer. Asked
                where no agent vouches for the term.

        Raises:
            FencedError: there is a newer term; nothing was killed.
        """
        handle, node = self._workers.get(worker), self._node_of.get(worker, "")
        returning = False
        try:
            await self.call_agent(node, "kill", term, worker, timeout_s=CLOSE_TIMEOUT_S, patience_s=0.0)
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
        self._workers.pop(worker, None)
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
        """Note that a worker's process has ended: it holds no resources any more."""
        self._placed.pop(worker, None)

    def node_of(self, worker: str) -> str:
        """Node of a worker; empty where it is not known."""
        return self._node_of.get(worker, "")

    def workers_on(self, node: str) -> list[str]:
        """Workers that were started on a node and not killed since."""
        return [worker for worker in self._node_of.on(node) if worker in self._workers]

    async def figures(self) -> dict[str, list[dict[str, Any]]]:
        """Ask for the pages of all living workers, by node, as they are now."""
        said = await ask_all(self._agents, "figures", CLOSE_TIMEOUT_S)
        for node, error in said.items():
            if isinstance(error, BaseException):
                log.debug("no figures from node %s: %s", node[:8], error)
        return {node: pages for node, pages in said.items() if not isinstance(pages, BaseException)}

    async def evidence(self, generation: GenerationId, most_bytes: int, term: int) -> list[dict[str, Any]]:
        """Ask all nodes where the members of a generation are; an entry for each, or for a silent node."""
        which = (generation.term, generation.n)
        said = await ask_all(self._agents, "evidence", EVIDENCE_S, term, which, most_bytes)
        found: list[dict[str, Any]] = []
        for node, entries in said.items():
            if isinstance(entries, BaseException):
                found.append({"node": node, "problem": f"{type(entries).__name__}: {entries}"[:500]})
            else:
                found += [{"node": node, **entry} for entry in entries]
        return found

    async def close(self, term: int, keep: Source | None = None, finished: bool = True) -> None:
        """End every worker and agent of the run, and remove the nodes' folders, but the slots of ``keep``.

        Each agent ends what is on its node; Ray ends the actors of those that did, or that do not answer.

        Args:
            finished: the run is done; else slots that are marked already stay too: they are not committed.

        Raises:
            FencedError: an agent knows a newer term: it and its workers were left alone.
        """
        key = kept_slots.key_of(keep, finished)
        workers = {node: self._workers_of(node) for node in self._agents}
        await self._close_nodes(term, key, self._agents, workers)
        for worker, handle in self._workers.items():
            if self._node_of[worker] not in self._agents:
                ray.kill(handle)

    def _workers_of(self, node: str) -> list[ActorHandle]:
        return [self._workers[worker] for worker in self.workers_on(node)]

    async def _close_nodes(
        self,
        term: int,
        key: tuple[int, ...] | None,
        agents: Mapping[str, ActorHandle],
        workers: Mapping[str, list[ActorHandle]],
        is_newest: IsNewest | None = None,
    ) -> None:
        """Close nodes through their agents, and end the actors there, but where an agent refuses.

        Args:
            is_newest: asked where an agent says nothing; None: it was asked before.
        """
        refusals = []
        said_by = await ask_all(agents, "close", CLOSE_TIMEOUT_S, term, key, patience_s=CLOSE_TIMEOUT_S)
        for node, said in said_by.items():
            refused = refusal(said) if isinstance(said, BaseException) else None
            if refused is not None:
                refusals.append(refused)
                continue
            if isinstance(said, BaseException):
                log.debug("agent of node %s: %s", node[:8], said)
                if is_newest is not None and not is_dead(said) and not await is_newest():
                    continue  # nobody vouches for the term: what is there may be a successor's
            for handle in (*workers[node], agents[node]):
                ray.kill(handle)
        for refused in refusals:
            raise refused
