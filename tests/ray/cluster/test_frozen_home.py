"""A node whose agent stops just as its rendezvous store is asked for: it costs no other node's worker.

Machine, executor of commands, calls of members and the cluster's bookkeeping are the real ones; agents and
workers are the fake cluster's.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.bench.coordinator.fake_cluster import FakeCluster
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.coordinator import generation_calls
from picotron_ray.runtime.coordinator.command_executor import CommandExecutor
from picotron_ray.runtime.coordinator.run_actors import FEW, RunActors
from tests.support.runs.coordinator_world import choose_dp, job
from tests.support.selection import also_deep

BEAT_S = 0.1
NODE_TIMEOUT_S = 3.0


class Frozen(FakeCluster):
    """A fake cluster whose agents answer for a store as the real one is asked, unless they are frozen."""

    def __init__(self, nodes: int, workers_each: int, **changes: Any) -> None:
        super().__init__(
            job(
                cluster__max_workers=nodes * workers_each,
                elastic__heartbeat_s=BEAT_S,
                elastic__node_timeout_s=NODE_TIMEOUT_S,
                elastic__interrupt_timeout_s=0.5,
                **changes,
            ),
            nodes,
            workers_each,
        )
        self.frozen: set[str] = set()
        self.freezes: set[str] = set()  # agents that freeze once they are asked for a store
        self.stores_frozen = False  # no agent gives the address of one
        self.asked: list[str] = []  # nodes, for a store
        self.stores: dict[str, Any] = {}  # by worker: with which store it was called
        self.killed: list[str] = []

    store_address = RunActors.store_address  # type: ignore[assignment]

    async def call_agent(
        self, node: str, method: str, *arguments: Any, timeout_s: float | None = None, patience_s: float = 0.0
    ) -> Any:
        if method == "store_address":
            self.asked.append(node)
            if node in self.freezes:
                self.freezes.remove(node)
                self.frozen.add(node)
        if node in self.frozen or (self.stores_frozen and method == "store_address"):
            await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
        if method == "store_address":
            return node, 9, 0
        return await super().call_agent(node, method, *arguments)

    async def _ask(self, handle: Any, method: str, arguments: tuple[Any, ...], timeout_s: Any) -> Any:
        if method == "run_generation":
            _, spec, store = arguments
            self.stores[handle.name] = store
            if store is None and handle.spec is not spec:  # as a worker answers
                return m.Outcome(handle.name, spec.id, FailureKind.PEER_LOST, -1, "no rendezvous store")
        return await super()._ask(handle, method, arguments, timeout_s)

    async def kill_worker(self, term: int, worker: str, is_newest: Any) -> None:
        self.killed.append(worker)
        await super().kill_worker(term, worker, is_newest)


class Run:
    """A coordinator's loop round a real machine and a real executor of its commands."""

    def __init__(self, cluster: Frozen) -> None:
        self.cluster = cluster
        self.machine = Machine(cluster._job, choose_dp)
        store: Any = SimpleNamespace(
            data="",
            executor=ThreadPoolExecutor(1),
            append_generation=lambda spec: m.Appended("generation", spec.id, spec.resume_step, 1),
            is_newest=lambda: True,
            save_record=lambda record: None,
        )
        self.store = store
        record: Any = SimpleNamespace(note=lambda *words: None, memo=dict)
        self.executor = CommandExecutor(
            asyncio.get_running_loop(), cluster, store, record, self.hear, lambda questions: None
        )
        self.executor.term = 1
        cluster.on_exit = lambda worker, cause: self.hear(m.WorkerExited(worker, cause))
        self.specs: list[m.GenerationSpec] = []
        self.events: list[m.Event] = []

    def hear(self, event: m.Event) -> None:
        self.events.append(event)
        for command in self.machine.handle(event, time.monotonic()):
            if isinstance(command, m.RunGeneration):
                self.specs.append(command.spec)
            self.executor.carry_out(command)

    async def begin(self) -> None:
        self.hear(m.Begin(1, (), (), None, (), ()))
        for event in await self.cluster.changes(1):
            self.hear(event)

    async def beat_until(self, done: Any, limit_s: float) -> None:
        """Let agents that are not frozen beat until something is so, for ``limit_s`` at most."""
        until = time.monotonic() + limit_s
        while not done() and time.monotonic() < until:
            for node in self.cluster.nodes:
                if node not in self.cluster.frozen:
                    self.cluster.heard(node)
                    self.hear(m.Heartbeat(node, None, {}, tuple(self.cluster.workers_on(node))))
            self.hear(m.Tick())
            await asyncio.sleep(BEAT_S)

    def elsewhere(self, node: str) -> list[str]:
        return [name for name, worker in self.cluster.workers.items() if worker.node != node]

    def end(self) -> None:
        self.executor.ending = True
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        self.store.executor.shutdown()


@pytest.mark.parametrize("workers_each", [*also_deep(2), FEW // 2 + 1])
def test_an_agent_that_freezes_as_its_store_is_asked_for_costs_no_other_nodes_worker(
    workers_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own node is lost; until then another node's store is used, and all members are called."""
    monkeypatch.setattr(generation_calls, "WATCH_S", 0.1)

    async def work() -> None:
        run = Run(cluster := Frozen(2, workers_each))
        home, other = cluster.nodes
        cluster.freezes.add(home)
        await run.begin()
        await run.beat_until(lambda: bool(cluster.frozen), 10.0)
        healthy = run.elsewhere(home)
        await run.beat_until(lambda: cluster.all_called, 10.0)
        assert len(run.specs) == 1, "before its node counts as lost"
        assert cluster.asked == [home, other]
        assert len(healthy) == workers_each
        await run.beat_until(lambda: len(run.specs) == 2 and cluster.all_called, 10.0)
        assert sorted(member.worker for member in run.specs[1].members) == sorted(healthy)
        assert cluster.asked == [home, other, other], "one that is silent is not asked at all"
        assert cluster.killed == []
        run.end()

    asyncio.run(work())


def test_members_of_a_generation_that_is_given_up_before_there_is_a_store_answer_at_once() -> None:
    """No agent gives the address of one, and one node is lost: nobody was called for anything."""

    async def work() -> None:
        run = Run(cluster := Frozen(3, 2))
        cluster.stores_frozen = True
        await run.begin()
        await run.beat_until(lambda: bool(cluster.asked), 10.0)
        lost = cluster.nodes[1]
        healthy = run.elsewhere(lost)
        run.hear(cluster.lose_node(lost))
        await run.beat_until(lambda: len(run.specs) == 2, 5.0)
        assert cluster.killed == []
        assert {worker: cluster.stores[worker] for worker in healthy} == dict.fromkeys(healthy)
        cluster.stores_frozen = False
        await run.beat_until(lambda: cluster.all_called, 5.0)
        assert None not in {cluster.stores[worker] for worker in healthy}
        run.end()

    asyncio.run(work())


def test_the_members_of_an_adopted_generation_are_joined_without_a_store() -> None:
    """They have one; whether an agent could give another's address is no matter."""

    async def work() -> None:
        run = Run(cluster := Frozen(2, 2))
        cluster.adopt_workers = lambda members: None  # type: ignore[method-assign]
        await run.begin()
        await run.beat_until(lambda: cluster.all_called, 10.0)
        cluster.frozen.add(cluster.nodes[0])
        cluster.asked.clear()
        cluster.stores.clear()
        run.executor.carry_out(m.RunGeneration(run.specs[0], adopt=True))
        await asyncio.sleep(0.1)
        assert cluster.asked == []
        assert cluster.stores == dict.fromkeys(cluster.workers)
        run.end()

    asyncio.run(work())
