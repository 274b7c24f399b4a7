"""Cluster as the coordinator sees it: handles of agents and workers, and what Ray says of nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import precision_problem
from picotron_ray.coordinator.messages import (
    DrainNotice,
    GenerationSpec,
    Member,
    NodeJoined,
    NodeLost,
    Source,
    WorkerReady,
)
from picotron_ray.runtime.coordinator.start_actors import start_agent, start_worker
from picotron_ray.runtime.coordinator.storage_patience import Activity
from picotron_ray.runtime.ray_cluster.fingerprint import node_versions
from picotron_ray.runtime.ray_cluster.kept_slots import MARKED_ALONE
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name, worker_actor_name
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, snapshot_problem
from picotron_ray.runtime.ray_cluster.placement import (
    NodeView,
    WorkerNeeds,
    draining_nodes,
    living_nodes,
    worker_needs,
)

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0
SILENT_BEATS = 3.0  # x elastic.heartbeat_s: an agent that said nothing for so long is asked whether it lives
NodeEvent = NodeJoined | NodeLost | DrainNotice | WorkerReady


async def answer(reference: Any, timeout_s: float | None = None) -> Any:
    """Await a Ray call from any event loop."""
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)


class Cluster:
    """Agents, workers and nodes of a run.

    All methods run on the coordinator's loop; each may be called again after a lost reply.
    """

    def __init__(self, job: JobConfig, slot_bytes: int = 0) -> None:
        """``slot_bytes``: of one snapshot slot of one worker, as the driver planned it; 0: not known."""
        self._job, self._slot_bytes = job, slot_bytes
        self._agents: dict[str, ActorHandle] = {}
        self._workers: dict[str, ActorHandle] = {}
        self._node_of: dict[str, str] = {}
        self._heard: dict[str, float] = {}  # node: when its agent last spoke, by the monotonic clock
        self._order: list[str] = []  # nodes in the order in which they joined
        self._home = ray.get_runtime_context().get_node_id()
        self._needs: WorkerNeeds | None = None
        self._draining: set[str] = set()
        self.metrics: dict[str, dict[str, str]] = {}  # what each agent says of its metrics endpoint
        self._placed: dict[str, str] = {}  # ready worker: its node, where it holds resources
        self._capacity: dict[str, int] = {}  # as last told, of the nodes that may take part
        self._device_bytes: dict[str, int] = {}  # memory of each node's smallest device; 0: not known
        self._versions = node_versions(job)

    # --- nodes -------------------------------------------------------------------------------------------

    async def hello(self, term: int) -> dict[str, dict[str, Any]]:
        """Greet the agents that live already; returns what each says, by node."""
        found: dict[str, dict[str, Any]] = {}
        for view in await asyncio.to_thread(living_nodes):
            try:
                handle = ray.get_actor(agent_name(self._job.name, view.id), NAMESPACE)
                found[view.id] = await answer(handle.hello.remote(term), 30)
            except (ValueError, RayError):
                continue  # no agent there, or it died with its node
            self._agents[view.id] = handle
            self.metrics[view.id] = found[view.id]["metrics"]
        return found

    async def changes(self, term: int) -> list[NodeEvent]:
        """Return the events of nodes since the last call."""
        views = {view.id: view for view in await asyncio.to_thread(living_nodes)}
        if self._needs is None or not self._needs.gpus:
            self._needs = worker_needs(self._job.cluster, list(views.values()))
        events: list[NodeEvent] = []
        for node in [node for node in self._order if node not in views]:
            self._forget(node)
            events.append(NodeLost(node, "Ray reports it dead"))
        for node in await self._without_agent(term):
            self.agent_died(node)
            events.append(NodeLost(node, "its agent died"))
        # the coordinator's own node comes first, so that a scripted fault can spare it
        for node in sorted(views.keys() - set(self._order), key=lambda node: (node != self._home, node)):
            joined = await self._join(term, views[node])
            if joined:
                self._order.append(node)
                events += joined
        return [*events, *self._changed_room(views), *await self._drains()]

    @property
    def needs(self) -> WorkerNeeds:
        """Resources that each worker reserves; known once nodes were looked at."""
        assert self._needs is not None
        return self._needs

    def heard(self, node: str) -> None:
        """Note that an agent spoke."""
        self._heard[node] = time.monotonic()

    async def _without_agent(self, term: int) -> list[str]:
        """Nodes that Ray holds to be alive, but whose agent has died; only silent ones are asked."""
        dead, now = [], time.monotonic()
        for node in self._order:
            if now - self._heard.setdefault(node, now) < SILENT_BEATS * self._job.elastic.heartbeat_s:
                continue
            try:
                await answer(self._agents[node].hello.remote(term), CLOSE_TIMEOUT_S)
            except (ActorUnavailableError, TimeoutError):
                continue
            except RayActorError:
                dead.append(node)
        return dead

    def agent_died(self, node: str) -> None:
        """Forget a node, so that it gets a fresh agent where Ray holds it to be alive."""
        if node in self._order:
            self._forget(node)

    def _changed_room(self, views: dict[str, NodeView]) -> list[NodeEvent]:
        """Find nodes whose capacity for us changed: other runs and jobs take and give room."""
        events: list[NodeEvent] = []
        for node, told in self._capacity.items():
            capacity = self._room(views[node])
            if capacity != told:
                self._capacity[node] = capacity
                events.append(NodeJoined(node, capacity, device_bytes=self._device_bytes[node]))
        return events

    def _room(self, view: NodeView) -> int:
        """Workers of this run that fit on a node beside others: those that are there, and what is free.

        One that is starting counts as neither while it holds its place already: for seconds the node looks
        smaller than it is, which starts nothing.
        """
        assert self._needs is not None
        own = sum(node == view.id for node in self._placed.values())
        return min(view.capacity(self._needs), own + view.room(self._needs))

    def gone(self, worker: str) -> None:
        """Note that a worker's process has ended: it holds no resources any more."""
        self._placed.pop(worker, None)

    async def _join(self, term: int, view: NodeView) -> list[NodeEvent]:
        """Put an agent on a node; nothing where it has no room, or cannot be reached yet."""
        assert self._needs is not None
        if self._room(view) < 1:
            return []
        handle = start_agent(self._job, view.id, view.host)
        try:
            hello = await answer(handle.hello.remote(term), 60)
            self._agents[view.id] = handle
            self.metrics[view.id] = hello["metrics"]
        except (RayError, TimeoutError) as error:
            log.warning("node %s has no agent yet: %s", view.id[:8], error)
            return []
        strangers = [Member(worker, view.id) for worker in hello["workers"] if worker not in self._workers]
        self.adopt_workers(tuple(strangers))  # known now; the machine judges what becomes of them
        capacity = self._room(view)
        mismatch = self._mismatch(hello, capacity)
        if not mismatch:
            self._capacity[view.id] = capacity
        facts = _facts(hello)
        self._device_bytes[view.id] = facts.device_bytes if self._needs.gpus else 0
        kept, kept_by = hello.get("kept", ()), hello.get("kept_by")
        joined = NodeJoined(view.id, capacity, mismatch, self._device_bytes[view.id], kept, kept_by)
        return [joined, *(WorkerReady(member.worker, member.node) for member in strangers)]

    def _mismatch(self, hello: dict[str, Any], workers: int) -> str:
        """Reason for which a node may not take part, from what its agent says; empty: it may."""
        theirs = hello["versions"]
        seen = [f"{k} {theirs[k]} (expected {v})" for k, v in self._versions.items() if theirs[k] != v]
        device = "cuda" if self.needs.gpus else "cpu"
        facts = _facts(hello)
        problem = precision_problem(self._job, device, facts.capabilities)
        room = snapshot_problem(self._job, facts.snapshot_bytes, self._slot_bytes, workers)
        return "; ".join([*seen, *([f"precision: {problem}"] if problem else []), *filter(None, [room])])

    def _forget(self, node: str) -> None:
        self._order.remove(node)
        self._capacity.pop(node, None)
        self._placed = {worker: at for worker, at in self._placed.items() if at != node}
        self._heard.pop(node, None)
        self._agents.pop(node, None)
        for worker in self.workers_on(node):  # if they live, a later agent there reports them as strangers
            self._workers.pop(worker)
        self.metrics.pop(node, None)

    async def _drains(self) -> list[NodeEvent]:
        notices: list[NodeEvent] = []
        for node, deadline in (await asyncio.to_thread(draining_nodes)).items():
            if node in self._order and node not in self._draining:
                self._draining.add(node)
                left = deadline - time.time()
                notices.append(DrainNotice(node, time.monotonic() + left if deadline else 0.0))
        return notices

    def remove_node(self, index: int) -> None:
        """Unplug the node that joined as number ``index`` (a scripted fault)."""
        if index < len(self._order):
            self._agents[self._order[index]].die.remote()

    # --- actors ------------------------------------------------------------------------------------------

    async def store_address(self, spec: GenerationSpec) -> tuple[str, int]:
        """Ask for the rendezvous store of a generation: the one on the node of rank 0."""
        host, port = await self.call_agent(spec.members[0].node, "store_address")
        return host, port

    async def call_agent(self, node: str, method: str, *arguments: Any) -> Any:
        """Call the agent of a node; raises RayError where it is gone."""
        handle = self._agents.get(node)
        if handle is None:
            raise RayError(f"node {node[:8]} has no agent")
        return await answer(getattr(handle, method).remote(*arguments))

    async def call_worker(self, worker: str, method: str, *arguments: Any) -> Any:
        """Call a worker; raises RayError where it is gone."""
        handle = self._workers.get(worker)
        if handle is None:
            raise RayActorError(error_msg=f"worker {worker} is gone")
        return await answer(getattr(handle, method).remote(*arguments))

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

    async def start_worker(self, worker: str, node: str) -> None:
        """Start a worker and wait until it is ready; raises RayError where it cannot be."""
        assert self._needs is not None
        self._node_of[worker] = node
        self._workers[worker] = start_worker(self._job, worker, node, self._needs)
        await answer(self._workers[worker].ready.remote())
        self._placed[worker] = node

    async def kill_worker(self, term: int, worker: str) -> None:
        """Kill a worker by SIGKILL through its node's agent; through Ray where the agent is gone too."""
        handle = self._workers.pop(worker, None)
        self.gone(worker)
        try:
            await self.call_agent(self._node_of.get(worker, ""), "kill", term, worker)
        except RayError:
            log.debug("no agent to kill %s", worker)
        if handle is not None:
            ray.kill(handle)

    def workers_on(self, node: str) -> list[str]:
        """Workers that were started on a node and not killed since."""
        return [worker for worker in self._workers if self._node_of[worker] == node]

    async def figures(self) -> dict[str, list[dict[str, Any]]]:
        """Ask for the pages of all living workers, by node, as they are now."""
        found = {}
        for node, handle in self._agents.items():
            try:
                found[node] = await answer(handle.figures.remote(), CLOSE_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                log.debug("no figures from node %s: %s", node[:8], error)
        return found

    async def activity(self) -> Activity:
        """Say whether the run has agents, and whether a worker is in a generation; needs no term."""
        for view in await asyncio.to_thread(living_nodes):
            try:
                self._agents[view.id] = ray.get_actor(agent_name(self._job.name, view.id), NAMESPACE)
            except ValueError:
                continue
        if not self._agents:
            return "none"
        pages = [page for pages in (await self.figures()).values() for page in pages]
        return "training" if any(page["phase"] != "idle" for page in pages) else "idle"

    async def close(self, term: int, keep: Source | None = None, finished: bool = True) -> None:
        """End every worker and agent of the run, and remove the nodes' folders, but the slots of ``keep``.

        Args:
            finished: the run is done; else slots that are marked already stay too: they are not committed.
        """
        key: tuple[int, ...] | None = None if finished else MARKED_ALONE
        if keep is not None:
            writer = keep.generation
            key = () if writer is None else (writer.term, writer.n, keep.step)
        for handle in self._workers.values():
            ray.kill(handle)
        for handle in self._agents.values():
            try:
                await answer(handle.close.remote(key), CLOSE_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                log.debug("agent: %s", error)
            ray.kill(handle)


def _facts(hello: dict[str, Any]) -> NodeFacts:
    """Facts that an agent tells of its node; one of an older version, which is refused by name, has none."""
    return hello.get("facts") or NodeFacts()
