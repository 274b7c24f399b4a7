"""Fake cluster of any size: what the coordinator's shell calls, answered without Ray, agents or workers.

Every call is answered after a short sleep on the coordinator's own loop. A generation's call of a member, or
of the agent of several, stays open until one of them is interrupted or killed, as a real one does. What the
shell knows of nodes and workers, and how it looks at them, is the real cluster's code: only what Ray would
say is made up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import (
    Appended,
    DrainNotice,
    Fragment,
    GenerationId,
    GenerationSpec,
    Member,
    NodeJoined,
    NodeLost,
    Outcome,
    SlotInfo,
    Source,
    WorkerExited,
)
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.coordinator.beat_groups import BeatGroups
from picotron_ray.runtime.coordinator.cluster import Cluster, NodeEvent
from picotron_ray.runtime.coordinator.run_actors import IsNewest, RunActors
from picotron_ray.runtime.coordinator.storage_patience import Activity
from picotron_ray.runtime.node_agent.uploads import Ended
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds
from picotron_ray.runtime.run_storage.run_store import RunStore
from picotron_ray.runtime.worker.member_call import MemberEnd

LATENCY_S = 0.005
SLOTS_HELD = 2  # newest steps of which each worker holds a slot


@dataclass(slots=True)
class FakeWorker:
    """A worker: its node, and the generation that it is in; ``ends``: where its end is told."""

    name: str
    node: str
    rank: int = 0
    spec: GenerationSpec | None = None
    ends: Ends | None = None
    slots: list[SlotInfo] = field(default_factory=list)


class Ends:
    """Ends of members that one call asked for; it is answered soon after the first."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._found: list[MemberEnd] = []

    def add(self, end: MemberEnd) -> None:
        if not self._found:
            self._answer.get_loop().call_later(LATENCY_S, self._answer.set_result, None)
        self._found.append(end)

    async def first(self) -> list[MemberEnd]:
        """Return those that ended first, once one has."""
        await self._answer
        return self._found


class FakeCluster(Cluster):
    """Nodes of ``workers_each`` workers; ``step`` is what all members of the generation have finished."""

    def __init__(self, job: JobConfig, nodes: int, workers_each: int) -> None:
        RunActors.__init__(self, job)  # the cluster's own beginning asks Ray
        self.nodes = [f"{index:056x}" for index in range(nodes)]  # as long as Ray's names
        self.workers: dict[str, FakeWorker] = {}
        self._workers = self.workers  # type: ignore[assignment]  # in the place of Ray's handles
        self.workers_each = workers_each
        self.spec: GenerationSpec | None = None
        self.told_s = 0.0  # when a member was last told to leave
        self.called_s = 0.0  # when members were last called for a generation
        self.calls_made = self._entered = 0
        self.began_s = 0.0  # of the generation, by the monotonic clock
        self.metrics: dict[str, dict[str, str]] = {}
        self.groups = BeatGroups(job.elastic.heartbeat_s)
        self._traits: dict[str, Any] = {}
        self._heard: dict[str, float] = {}
        self._errors = Counter[str]()
        self._order: list[str] = []
        self._refused: dict[str, float] = {}
        self._capacity: dict[str, int] = {}
        self._needs = WorkerNeeds(cpus=1.0, gpus=0.0)
        self.on_exit: Callable[[str, str], None] = lambda worker, cause: None  # the agents' report
        self.on_uploaded: Callable[[str, Ended], None] = lambda node, end: None

    # --- nodes -------------------------------------------------------------------------------------------

    def device(self) -> str:
        return "cpu"

    async def hello(self, term: int, tell: Any = None, newest: Any = None) -> dict[str, dict[str, Any]]:
        return {}

    async def changes(self, term: int) -> list[NodeEvent]:
        """Return all nodes at once, which is the worst case; later, look at them as the real cluster does."""
        if not self._order:
            self._order, self._capacity = list(self.nodes), dict.fromkeys(self.nodes, self.workers_each)
            return [NodeJoined(node, self.workers_each) for node in self.nodes]
        return self._changed_room({node: self._view(node) for node in self._order})

    def _view(self, node: str) -> NodeView:
        """Return what Ray would say of a node on which nothing else runs."""
        free = self.workers_each - self._placed.count(node)
        return NodeView(node, node, self.workers_each, 0.0, free, 0.0)

    async def drains(self) -> list[DrainNotice]:
        return []

    def lose_node(self, node: str) -> NodeLost:
        """Take a node away; returns the event that Ray's list of nodes would lead to."""
        for name in self.workers_on(node):
            self._end(name)
        self.nodes.remove(node)
        self._forget(node)
        return NodeLost(node, "Ray reports it dead")

    def agent_died(self, node: str) -> None:
        raise AssertionError(f"no agent of the fake cluster dies: {node}")

    # --- actors ------------------------------------------------------------------------------------------

    def shared(self, spec: GenerationSpec) -> GenerationSpec:
        return spec

    async def store_address(self, home: str) -> tuple[str, int]:
        await asyncio.sleep(LATENCY_S)
        return "fake", 1

    async def start_worker(self, worker: str, node: str) -> str:
        await self._starts.take()
        await asyncio.sleep(LATENCY_S)
        self.workers[worker] = FakeWorker(worker, node)
        self._node_of[worker] = self._placed[worker] = node
        return ""

    async def kill_worker(self, term: int, worker: str, is_newest: IsNewest) -> None:
        await asyncio.sleep(LATENCY_S)
        self.kill(worker)

    def kill(self, worker: str) -> None:
        """End a worker's process."""
        held = self.workers.get(worker)
        if held is not None:
            self._end(worker)
            self.on_exit(worker, "process gone")

    def _end(self, worker: str) -> None:
        held = self.workers.pop(worker)
        if held.ends is not None:
            held.ends.add(WorkerExited(worker, "process died"))

    async def _ask(
        self, handle: Any, method: str, arguments: tuple[Any, ...], timeout_s: float | None
    ) -> Any:
        worker: str = handle.name
        self.calls_made += 1
        if method == "run_generation":
            (end,) = await self._run([worker], arguments[1])
            if isinstance(end, WorkerExited):
                raise RayActorError(error_msg=f"worker {worker} is gone")
            return end
        await asyncio.sleep(LATENCY_S)
        self._obey(worker, method, arguments)
        return True

    def _obey(self, worker: str, method: str, arguments: Sequence[Any]) -> None:
        held = self.workers.get(worker)
        if held is not None and method == "interrupt" and arguments[2] == "hard":
            self.told_s = time.monotonic()
            self._leave(worker, held)

    async def _run(self, workers: Iterable[str], spec: GenerationSpec) -> list[MemberEnd]:
        """Have workers of one node enter a generation; returns the first that leave or end."""
        if self.spec is not None and spec.id < self.spec.id:
            return []
        if self.spec is not spec:
            self.spec, self.began_s, self._entered = spec, time.monotonic(), 0
            self._ranks = {member.worker: rank for rank, member in enumerate(spec.members)}
        self.called_s, ends = time.monotonic(), Ends()
        for worker in workers:
            held = self.workers.get(worker)
            self._entered += held is None or held.spec is not spec
            if held is None:
                ends.add(WorkerExited(worker, "process died"))
            elif held.spec is spec and held.ends is None:
                ends.add(self._outcome(worker, spec))  # it has ended before it was asked for again
            else:
                held.rank, held.spec, held.ends = self._ranks[worker], spec, ends
        return await ends.first()

    @property
    def all_called(self) -> bool:
        """Whether all members of the newest generation were called for it."""
        return self.spec is not None and self._entered >= len(self.spec.members)

    def _leave(self, worker: str, held: FakeWorker) -> None:
        if held.ends is None or held.spec is None:
            return
        step = self.step()
        held.slots = list(self._slots(worker, held, range(max(1, step - SLOTS_HELD + 1), step + 1)))
        held.ends.add(self._outcome(worker, held.spec))
        held.ends = None

    def _outcome(self, worker: str, spec: GenerationSpec) -> Outcome:
        return Outcome(worker, spec.id, FailureKind.PEER_LOST, self.step())

    def step(self) -> int:
        """Finished steps of the generation: one a second."""
        return 0 if self.spec is None else self.spec.resume_step + int(time.monotonic() - self.began_s)

    def _slots(self, worker: str, held: FakeWorker, steps: Iterable[int]) -> Iterable[SlotInfo]:
        assert held.spec is not None
        group = held.spec.layout.state_group(held.rank)
        for step in steps:
            name = f"{worker}.{step % 3}.slot"
            yield SlotInfo(held.node, name, held.spec.id, step, held.rank, (Fragment(group),))

    def sealed_slots(self, node: str, step: int) -> list[SlotInfo]:
        """Return the slots of a checkpoint of ``step`` on one node."""
        members = [(name, self.workers[name]) for name in self.workers_on(node)]
        return [slot for name, held in members if held.spec for slot in self._slots(name, held, [step])]

    async def call_agent(
        self,
        node: str,
        method: str,
        *arguments: Any,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
    ) -> Any:
        await self._calls.take()
        self.calls_made += 1
        if method == "run_generation":
            _, _, (spec,), _, workers = arguments
            return await self._run(workers, spec)
        await asyncio.sleep(LATENCY_S)
        if method == "order":
            term, workers, what, rest = arguments
            for worker in workers:
                self._obey(worker, what, (term, *rest))
        if method == "upload":
            _, generation, step, slots = arguments
            self.on_uploaded(node, Ended(generation, step, slots, b""))
        if method == "inventory":
            return tuple(slot for name in self.workers_on(node) for slot in self.workers[name].slots)
        return {}

    def adopt_workers(self, members: tuple[Member, ...]) -> None:
        assert not members

    async def figures(self) -> dict[str, list[dict[str, Any]]]:
        return {}

    async def activity(self) -> Activity:
        return "none"

    async def close(self, term: int, keep: Source | None = None, finished: bool = True) -> dict[str, str]:
        """Nothing is left behind."""
        return {}


class FakeStore(RunStore):
    """A run's log in a real folder; commits are noted without a manifest, as no node has uploaded bytes."""

    def commit(
        self, generation: GenerationId, step: int, parts: list[bytes], unproven: bool = False
    ) -> Appended:
        return Appended("commit", generation, step, step + 1, f"manifests/{step}", digest="none")

    def collect_garbage(self) -> str:
        """There are no chunks."""
        return ""
