"""Members of a real generation that are called by their node's agent, as those of a large one are."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.ray_runs import tiny_job
from tests.support.selection import also_deep

pytestmark = pytest.mark.timeout(120)
WORKERS = ("w1", "w2")


class Run:
    """Agent, workers and calls of one run, in this process as in the coordinator's."""

    def __init__(self, storage: Path) -> None:
        import ray

        from picotron_ray.runtime.coordinator.generation_calls import GenerationCalls
        from picotron_ray.runtime.coordinator.run_actors import RunActors
        from picotron_ray.runtime.coordinator.start_actors import start_agent, start_worker
        from picotron_ray.runtime.ray_cluster.placement import WorkerNeeds

        self.job = tiny_job("called-by-node", storage, steps=1_000_000, metrics={"enabled": False})
        self.node = ray.get_runtime_context().get_node_id()
        actors: Any = RunActors(self.job)
        self.agent: Any = start_agent(self.job, self.node, ray.util.get_node_ip_address())
        actors._agents[self.node] = self.agent
        actors.is_silent = lambda node: False
        for worker in WORKERS:
            needs = WorkerNeeds(cpus=1.0, gpus=0.0)
            actors._workers[worker] = start_worker(self.job, worker, self.node, needs, 0)
            actors._node_of[worker] = self.node
        self.actors = actors
        ray.get([handle.ready.remote() for handle in actors._workers.values()], timeout=60)
        self.pid: int = ray.get(self.agent.hello.remote(1), timeout=30)["pid"]
        self.events: list[m.Event] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.calls = GenerationCalls(actors, self.events.append, self.spawn, lambda: True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def begin(self) -> None:
        """Run a generation until its members have done steps."""
        members = tuple(m.Member(worker, self.node) for worker in WORKERS)
        spec = m.GenerationSpec(m.GenerationId(1, 1), members, Layout(dp=2), m.Source("init"), "test")
        host, port, _ = await self.actors.call_agent(self.node, "store_address")
        self.spawn(self.calls.run(1, spec, (host, port), self.node))
        while min(self.steps(), default=0) < 2:
            await asyncio.sleep(0.05)

    def steps(self) -> list[int]:
        return [page.step for page in self.pages().values()]

    def page_file(self, worker: str) -> Path:
        from picotron_ray.runtime.ray_cluster.names import node_folder

        return node_folder(self.job.snapshot.folder, self.job.name, self.node) / f"{worker}.page"

    def pages(self) -> dict[str, Any]:
        from picotron_ray.runtime.heartbeat import read_page

        found = {worker: read_page(self.page_file(worker)) for worker in WORKERS}
        return {worker: page for worker, page in found.items() if page is not None}

    async def until_both_ended(self) -> None:
        async with asyncio.timeout(20.0):
            while len(self.events) < 2:
                await asyncio.sleep(0.01)

    def end(self) -> None:
        import ray

        for _ in range(50):  # an agent that was killed is on its way back
            try:
                ray.get(self.agent.close.remote(None), timeout=20)
                break
            except ray.exceptions.RayActorError:
                time.sleep(0.2)
        for handle in (self.agent, *self.actors._workers.values()):
            ray.kill(handle)


@pytest.fixture
def run(connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    from picotron_ray.runtime.coordinator import generation_calls, run_actors

    monkeypatch.setattr(generation_calls, "FEW", 1)
    monkeypatch.setattr(run_actors, "FEW", 1)  # the spec is passed by reference
    made = Run(tmp_path)
    yield made
    made.end()


def test_a_workers_death_and_the_others_outcomes_come_by_way_of_the_agent(run: Run) -> None:
    async def work() -> None:
        await run.begin()
        assert [task.get_coro().__name__ for task in run.tasks].count("_run_member") == 0
        os.kill(run.pages()["w1"].pid, signal.SIGKILL)
        await run.until_both_ended()

    asyncio.run(work())
    assert run.events[0] == m.WorkerExited("w1", "process died") or len(run.events) == 2
    (outcome,) = [event for event in run.events if isinstance(event, m.Outcome)]
    assert (outcome.worker, outcome.kind) == ("w2", FailureKind.PEER_LOST)
    assert m.WorkerExited("w1", "process died") in run.events


@pytest.mark.parametrize("how", [signal.SIGKILL, *also_deep(signal.SIGSTOP)])
def test_a_generation_outlasts_the_agent_that_began_it(run: Run, how: signal.Signals) -> None:
    """Its steps go on, and a worker's death right after the agent's is heard all the same."""

    async def work() -> None:
        await run.begin()
        run.actors.is_silent = lambda node: how == signal.SIGSTOP
        os.kill(run.pid, how)
        before = max(run.steps())
        async with asyncio.timeout(20.0):
            while min(run.steps()) < before + 5:
                await asyncio.sleep(0.05)
        assert run.events == []
        os.kill(run.pages()["w1"].pid, signal.SIGKILL)
        await run.until_both_ended()

    asyncio.run(work())
    if how == signal.SIGSTOP:
        os.kill(run.pid, signal.SIGCONT)
    assert m.WorkerExited("w1", "process died") in run.events
    (outcome,) = [event for event in run.events if isinstance(event, m.Outcome)]
    assert (outcome.worker, outcome.kind) == ("w2", FailureKind.PEER_LOST)


def test_a_later_term_adopts_a_generation_without_a_look_at_its_workers_names(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agent calls them; one that is called directly is looked up then, and one that ended is gone."""
    import ray

    from picotron_ray.runtime.coordinator.generation_calls import GenerationCalls
    from picotron_ray.runtime.coordinator.run_actors import RunActors

    asked: list[str] = []
    look_up = ray.get_actor
    monkeypatch.setattr(ray, "get_actor", lambda name, space: asked.append(name) or look_up(name, space))
    later: Any = RunActors(run.job)
    later._agents, later.is_silent = {run.node: run.agent}, lambda node: False

    async def work() -> None:
        await run.begin()
        members = tuple(m.Member(worker, run.node) for worker in (*WORKERS, "ended"))
        later.adopt_workers(members)
        calls = GenerationCalls(later, run.events.append, run.spawn, lambda: True)
        spec = m.GenerationSpec(m.GenerationId(1, 1), members[:2], Layout(dp=2), m.Source("init"), "test")
        run.spawn(calls.run(2, spec, None, ""))
        await asyncio.sleep(0.5)
        assert asked == []
        with pytest.raises(ray.exceptions.RayActorError, match="worker ended is gone"):
            await later.call_worker("ended", "ready")
        assert len(asked) == 1
        for _ in range(2):
            await later.call_worker("w2", "interrupt", 2, (1, 1), "hard")
        assert len(asked) == 2
        await run.until_both_ended()

    asyncio.run(work())
    assert {type(event) for event in run.events} == {m.Outcome}


@pytest.mark.parametrize("adopted", [*also_deep(False), True])
def test_a_worker_without_a_page_is_ended_by_ray(run: Run, adopted: bool) -> None:
    """Its agent finds no process to kill, and a later term has no handle of it before it asks for one."""
    from picotron_ray.runtime.coordinator.run_actors import RunActors
    from picotron_ray.runtime.heartbeat import process_alive

    actors: Any = run.actors
    if adopted:
        actors = RunActors(run.job)
        actors._agents = {run.node: run.agent}
        actors.adopt_workers((m.Member("w2", run.node),))

    async def newest() -> bool:
        return True

    async def work() -> None:
        await run.begin()
        page = run.pages()["w2"]
        run.page_file("w2").unlink()
        await actors.kill_worker(1, "w2", newest)
        async with asyncio.timeout(30.0):
            while process_alive(page.pid, page.start_ticks):
                await asyncio.sleep(0.05)
        await run.until_both_ended()

    asyncio.run(work())
    assert [event.worker for event in run.events if isinstance(event, m.WorkerExited)] == ["w2"]
