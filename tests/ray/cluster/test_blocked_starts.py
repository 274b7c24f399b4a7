"""Starts of actors while Ray's head stands still: they take as long as that, and nothing else does."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator import cluster as cluster_module
from tests.support.runs.coordinator_parts import Nodes, view


class Head:
    """Ray's head, which answers once it is let go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = threading.Event()
        self.worker = SimpleNamespace(ready=SimpleNamespace(remote=lambda: ("w", "ready")))

    def start_worker(self, *_: Any) -> Any:
        self.asked.set()
        assert self.goes_on.wait(60)
        return self.worker


@pytest.fixture
def head(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Head:
    found = Head()
    monkeypatch.setattr(cluster_module, "start_worker", found.start_worker)
    return found


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes(monkeypatch)
    found.views = [view("a")]
    found.changes()
    del found.cluster._start  # type: ignore[method-assign]  # by the real one from now on
    return found


async def starting(nodes: Nodes, head: Head) -> asyncio.Task[str]:
    task = asyncio.create_task(nodes.cluster.start_worker("w1", "a"))
    await asyncio.to_thread(head.asked.wait, 60)
    return task


def test_the_loop_goes_on_while_a_worker_is_started(nodes: Nodes, head: Head) -> None:
    async def run() -> None:
        task = await starting(nodes, head)
        nodes.cluster.note_workers("a", ())  # a heartbeat that does not name it yet
        assert await nodes.cluster.changes(1) == []
        head.goes_on.set()
        assert await task == ["w"]  # type: ignore[comparison-overlap]

    asyncio.run(run())
    assert nodes.cluster.workers_on("a") == ["w1"]


@pytest.mark.parametrize("how", ["killed", "closed", "node lost"])
def test_a_worker_that_is_ended_while_it_is_started_is_ended(nodes: Nodes, head: Head, how: str) -> None:
    lookup: Future[None] = Future()

    async def no_actor_yet(worker: str) -> None:
        lookup.set_result(None)

    nodes.cluster._look_up = no_actor_yet  # type: ignore[method-assign]

    async def run() -> None:
        task = await starting(nodes, head)
        if how == "killed":
            await nodes.kill("w1")
        elif how == "closed":
            await nodes.cluster.close(1)
        else:
            nodes.views = []
            assert await nodes.cluster.changes(1) == [m.NodeLost("a", "Ray reports it dead")]
        head.goes_on.set()
        with pytest.raises(RayActorError, match="was ended while it was being started"):
            await task

    asyncio.run(run())
    assert head.worker in nodes.killed
    assert nodes.cluster.workers_on("a") == [] or how == "closed"


def test_a_node_joins_off_the_loop_too(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    begin = cluster_module.start_agent

    def start_agent(job: Any, node: str, host: str) -> Any:
        assert goes_on.wait(60)
        return begin(job, node, host)

    monkeypatch.setattr(cluster_module, "start_agent", start_agent)
    monkeypatch.setattr(cluster_module, "LOOK_S", 0.05)
    nodes.views = [view("a"), view("b")]

    async def run() -> list[Any]:
        assert await nodes.cluster.changes(1) == []
        goes_on.set()
        return [event for _ in range(100) for event in await nodes.cluster.changes(1)]

    assert m.NodeJoined("b", 4) in asyncio.run(run())
