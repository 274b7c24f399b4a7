"""Cluster as the coordinator sees it: handles of agents and workers, and what Ray says of nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import (
    AgentRestarting,
    DrainNotice,
    Fenced,
    GenerationSpec,
    Member,
    NodeJoined,
    NodeLost,
    NodeTraits,
    WorkerReady,
)
from picotron_ray.coordinator.policies.store_home import SILENT_BEATS
from picotron_ray.errors import FencedError
from picotron_ray.runtime.coordinator.admission import idle_workers, joined, objection, traits_of
from picotron_ray.runtime.coordinator.beat_groups import BeatGroups
from picotron_ray.runtime.coordinator.greetings import LOOK_S, Greetings
from picotron_ray.runtime.coordinator.run_actors import IsNewest
from picotron_ray.runtime.coordinator.start_actors import start_agent, start_worker
from picotron_ray.runtime.ray_cluster.fingerprint import node_versions
from picotron_ray.runtime.ray_cluster.placement import (
    NodeView,
    WorkerNeeds,
    draining_nodes,
    keeping_nodes,
    living_nodes,
    worker_needs,
)
from picotron_ray.runtime.ray_cluster.ray_calls import (
    answer,
    refusal,
)

log = logging.getLogger(__name__)
JOIN_S = 60.0  # longest wait for a fresh agent
ASK_AGAIN_S = 60.0  # between questions to a node that was refused: what spoke against it may be mended
MOST_ASKED = 4  # such nodes at a time
NodeEvent = NodeJoined | NodeLost | AgentRestarting | WorkerReady | Fenced


class Cluster(Greetings):
    """Agents, workers and nodes of a run.

    All methods run on the coordinator's loop; each may be called again after a lost reply.
    """

    def __init__(self, job: JobConfig, slot_bytes: int = 0) -> None:
        """``slot_bytes``: of one snapshot slot of one worker, as the driver planned it; 0: not known."""
        super().__init__(job)
        self._slot_bytes = slot_bytes
        self.data = ""  # fingerprint of the run's; "": nobody knows it
        self._heard: dict[str, float] = {}  # node: when its agent last spoke, by the monotonic clock
        self._news: list[NodeEvent] = []  # not handed out yet
        self._home = ray.get_runtime_context().get_node_id()
        self._needs: WorkerNeeds | None = None
        self._joining: dict[str, asyncio.Task[list[NodeEvent]]] = {}  # nodes whose agent is coming up
        self._refused: dict[str, float] = {}  # node that may not take part: when it is asked again
        self._freed: set[str] = set()  # nodes that were given back
        self._capacity: dict[str, int] = {}  # as last told, of the nodes that may take part
        self._versions = node_versions(job)
        self.groups = BeatGroups(job.elastic.heartbeat_s)

    # --- nodes -------------------------------------------------------------------------------------------

    async def keeping(self, generations: tuple[GenerationSpec, ...]) -> dict[str, int]:
        """Newest step that each node keeps from an earlier launch; a run without one has none."""
        if not generations:
            return {}
        return await asyncio.to_thread(lambda: keeping_nodes(living_nodes(), self._job))

    async def changes(self, term: int) -> list[NodeEvent]:
        """Return the events of nodes since the last call; what an error cuts short comes with the next."""
        views = {view.id: view for view in await asyncio.to_thread(living_nodes)}
        if self._needs is None or not self._needs.gpus:
            self._needs = worker_needs(self._job.cluster, list(views.values()))
        for node in [node for node in self._order if node not in views]:
            self._forget(node)
            self._news.append(NodeLost(node, "Ray reports it dead"))
        for event in await self._silent_agents(term):
            if isinstance(event, NodeLost):
                self.agent_died(event.node)
            self._news.append(event)
        await self._greet(term, views)
        self._news += self._changed_room(views)
        news, self._news = self._news, []
        return news

    async def _greet(self, term: int, views: dict[str, NodeView]) -> None:
        """Have new nodes join, all at once; those that take longer than ``LOOK_S`` join in a later look."""
        going = await asyncio.to_thread(draining_nodes)
        fresh = views.keys() - set(self._order) | self._due(views)
        for node in sorted(fresh - self._joining.keys() - going.keys() - self._freed):
            self._joining[node] = asyncio.create_task(self._join(term, views[node]))
        if self._joining:
            await asyncio.wait(self._joining.values(), timeout=LOOK_S)
        done = [node for node, task in self._joining.items() if task.done()]
        # the coordinator's own node comes first, so that a scripted fault can spare it
        for node in sorted(done, key=lambda node: (node != self._home, node)):
            task = self._joining.pop(node)
            if node not in views:  # it died meanwhile
                self._forget(node)
            elif (error := task.exception()) is not None:
                log.error("node %s cannot join", node[:8], exc_info=error)  # tried again, with all others
            else:
                joins = any(isinstance(event, NodeJoined) for event in task.result())
                if joins and node not in self._order:
                    self._order.insert(0 if node == self._home else len(self._order), node)
                self._news += task.result()

    def _due(self, views: dict[str, NodeView]) -> set[str]:
        """Refused nodes that are asked again now, as if they were new."""
        now, asked = time.monotonic(), self._refused.keys() & self._joining.keys()
        late = [node for node, at in self._refused.items() if now >= at and node in views]
        found = set(sorted(late, key=self._refused.__getitem__)[: max(0, MOST_ASKED - len(asked))])
        self._refused.update(dict.fromkeys(found, now + ASK_AGAIN_S))
        return found

    def device(self) -> str:
        """Return the kind of device that workers get: "cuda" or "cpu"."""
        return "cuda" if worker_needs(self._job.cluster, living_nodes()).gpus else "cpu"

    @property
    def traits(self) -> tuple[NodeTraits, ...]:
        """Traits of the nodes whose agents were heard."""
        return tuple(self._traits.values())

    @property
    def needs(self) -> WorkerNeeds:
        """Resources that each worker reserves; known once nodes were looked at."""
        assert self._needs is not None
        return self._needs

    def heard(self, node: str) -> None:
        """Note that an agent spoke."""
        self._heard[node] = time.monotonic()

    def is_silent(self, node: str) -> bool:
        """Whether an agent has said nothing for longer than between two heartbeats."""
        now = time.monotonic()
        return now - self._heard.setdefault(node, now) >= SILENT_BEATS * self._job.elastic.heartbeat_s

    def agent_back(self, node: str, metrics: dict[str, str]) -> None:
        """Note that an agent was started again; it may be scraped at another address."""
        self.heard(node)
        self.metrics[node] = metrics

    def agent_died(self, node: str) -> None:
        """Forget a node, so that it gets a fresh agent where Ray holds it to be alive."""
        if node in self._order:
            self._forget(node)

    def _changed_room(self, views: dict[str, NodeView]) -> list[NodeEvent]:
        """Find nodes whose capacity for us changed: other runs and jobs take and give room."""
        events: list[NodeEvent] = []
        for node in self._order:
            capacity = self._room(views[node])
            if node in self._capacity and capacity != self._capacity[node]:
                self._capacity[node] = capacity
                events.append(joined(self._traits[node], capacity))
        return events

    def _room(self, view: NodeView) -> int:
        """Workers of this run that fit on a node beside others: those that are there, and what is free.

        One that is starting counts as neither while it holds its place already: for seconds the node looks
        smaller than it is, which starts nothing.
        """
        assert self._needs is not None
        own = self._placed.count(view.id)
        return min(view.capacity(self._needs), own + view.room(self._needs))

    async def _join(self, term: int, view: NodeView) -> list[NodeEvent]:
        """Put an agent on a node; nothing where it has no room, is not reached, or is refused again."""
        assert self._needs is not None
        has_agent = view.id in self._agents or (view.id in self._heard and not self.is_silent(view.id))
        if self._room(view) < 1 and not has_agent:  # one with an agent may be full of our own workers
            return []
        handle = await self._start(start_agent, self._job, view.id, view.host)
        try:
            hello = await answer(handle.hello.remote(term, self.run_identity), JOIN_S)
            self._agents[view.id] = handle
            self.metrics[view.id] = hello["metrics"]
            said = {view.id: hello}
            for error in (await self._read_specs(term, said, ("kept_by",))).values():
                raise error
            hello = said[view.id]
        except (RayError, TimeoutError, FencedError) as error:
            if (refused := refusal(error)) is not None:
                return [Fenced(str(refused))]
            log.warning("node %s has no agent yet: %s", view.id[:8], error)
            return []
        strangers = [Member(worker, view.id) for worker in hello["workers"] if worker not in self._workers]
        self.adopt_workers(tuple(strangers))  # known now; the machine judges what becomes of them
        capacity = self._room(view)
        device = "cuda" if self._needs.gpus else "cpu"
        mismatch = objection(self._job, hello, self._versions, device, self._slot_bytes, capacity)
        again = self._refused.pop(view.id, None) is not None
        if mismatch:
            self._refused[view.id] = time.monotonic() + ASK_AGAIN_S
            if again:
                return []
        else:
            self._capacity[view.id] = capacity
        self._traits[view.id] = traits_of(self._job, view, hello, self._needs)
        event = joined(self._traits[view.id], capacity, mismatch, hello)
        usable = () if mismatch else idle_workers(hello, self.data)
        idle = tuple(s.worker for s in strangers if s.worker in usable)
        others = [WorkerReady(s.worker, s.node) for s in strangers if s.worker not in idle]
        return [replace(event, idle=idle), *others]

    def _forget(self, node: str) -> None:
        if node in self._order:
            self._order.remove(node)
        self._capacity.pop(node, None)
        self._refused.pop(node, None)
        for worker in self._node_of.on(node):  # if they live, a later agent there reports them as strangers
            self._late.discard(worker)
            self.gone(worker)
        self._heard.pop(node, None)
        self._traits.pop(node, None)
        self.groups.forget(node)
        self._errors.pop(node, None)
        self._stores.forget(node)
        self._agents.pop(node, None)
        self.metrics.pop(node, None)

    async def drains(self) -> list[DrainNotice]:
        """Return the notices of all nodes of the run that are to go, as long as they last."""
        notices: list[DrainNotice] = []
        for node, deadline in (await asyncio.to_thread(draining_nodes)).items():
            if node in self._order:
                left = deadline - time.time()
                notices.append(DrainNotice(node, time.monotonic() + left if deadline else 0.0))
        return notices

    async def free(self, term: int, node: str, is_newest: IsNewest) -> None:
        """End all that the run has on a node that is to go; it is not looked at any more.

        Args:
            is_newest: as for ``kill_worker``.
        """
        agent, workers = self._agents.get(node), self._workers_of(node)
        self._freed.add(node)  # Ray may hold it to be as good as any other
        self._forget(node)  # first, or its end would count as a loss
        if agent is not None:
            await self._close_nodes(term, None, {node: agent}, {node: workers}, is_newest)

    def remove_node(self, index: int) -> None:
        """Unplug the node that joined as number ``index`` (a scripted fault)."""
        if index < len(self._order):
            self._agents[self._order[index]].die.remote()

    async def start_worker(self, worker: str, node: str) -> str:
        """Start a worker and wait until it is ready; returns the fingerprint of the data that it sees.

        Raises:
            RayError: it cannot be started.
            TimeoutError: it is not ready after twice the time that the machine gives it.
        """
        assert self._needs is not None
        await self._starts.take()
        self._node_of[worker], self._workers[worker] = node, None
        handle = await self._start(start_worker, self._job, worker, node, self._needs, self._slot_bytes)
        if worker not in self._workers or self._closed:  # it was ended before there was anything to end
            ray.kill(handle)
            raise RayActorError(error_msg=f"worker {worker} was ended while it was being started")
        self._workers[worker] = handle
        ready: Any = handle.ready.remote()
        try:
            fingerprint: str = await answer(ready, 2 * self._job.cluster.start_timeout_s)
        except TimeoutError:
            if worker in self._workers:
                self._late.add(worker)
            raise
        if worker in self._workers:  # else it was ended meanwhile
            self._placed[worker] = node
        return fingerprint
