"""Cluster and executor of commands beside fakes: agents and workers that answer as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator import cluster as cluster_module
from picotron_ray.runtime.coordinator import greetings, run_actors
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.command_executor import CommandExecutor
from picotron_ray.runtime.node_agent.specs import name_of
from picotron_ray.runtime.ray_cluster import ray_calls
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts
from picotron_ray.runtime.ray_cluster.placement import NodeView
from tests.support.runs.coordinator_world import job

Told = list[tuple[Any, ...]]


class Calls:
    """A cluster whose answers are given: a value, or an error to raise; by method, one call each."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.seen: Told = []

    def _next(self, method: str) -> Any:
        waiting = self.answers.get(method, [])
        answer = waiting.pop(0) if waiting else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def call_agent(
        self, node: str, method: str, *arguments: Any, timeout_s: Any = 1.0, patience_s: float = 0.0
    ) -> Any:
        self.seen.append((node, method, *arguments))
        return self._next(method)

    async def call_worker(self, worker: str, method: str, *arguments: Any, timeout_s: Any = 1.0) -> Any:
        self.seen.append((worker, method, *arguments))
        return self._next(method)

    async def start_worker(self, worker: str, node: str) -> Any:
        return self._next("start")

    async def kill_worker(self, term: int, worker: str, is_newest: Any) -> None:
        self.seen.append(("kill", term, worker))
        self._next("kill")

    def store_home(self, spec: m.GenerationSpec) -> str:
        return spec.members[0].node

    async def store_address(self, home: str) -> Any:
        return self._next("store")

    def shared(self, spec: m.GenerationSpec) -> m.GenerationSpec:
        return spec

    def adopt_workers(self, members: tuple[m.Member, ...]) -> None:
        self.seen.append(("adopt", *members))

    def agent_died(self, node: str) -> None:
        self.seen.append(("died", node))

    def node_of(self, worker: str) -> str:
        return worker.partition("/")[0]

    def workers_on(self, node: str) -> list[str]:
        return [f"{node}w"]


class Bench:
    """An executor with what it reports."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls, self.events, self.notes = Calls(), [], []
        self.retired: list[str] = []
        store: Any = SimpleNamespace(
            data="",
            executor=ThreadPoolExecutor(1),
            committer=ThreadPoolExecutor(1),
            collector=ThreadPoolExecutor(1),
            append_generation=lambda spec: m.Appended("generation", spec.id, 0, 1),
            commit=self._commit,
            collect_garbage=lambda: self.calls.seen.append(("garbage",)),
            take_retired=lambda: tuple(self.retired),
            take_given_up=list,
            save_record=lambda record: self.calls.seen.append(("record", record[17:])),
        )
        record: Any = SimpleNamespace(note=lambda *words: self.notes.append(words), memo=lambda: {"seq": 9})
        cluster: Any = self.calls
        self.planned: list[Any] = []
        self.executor = CommandExecutor(
            self.loop, cluster, store, record, self.events.append, self.planned.append
        )
        self.executor.term = 3
        self.committed: list[Any] = []
        self.on_commit: Callable[[], object] = lambda: None
        self.seq = 7

    def _commit(
        self, generation: m.GenerationId, step: int, parts: list[Any], unproven: bool = False
    ) -> m.Appended:
        self.on_commit()
        self.committed.append((generation, step, parts))
        return m.Appended("commit", generation, step, self.seq)

    def run(self, *commands: m.Command) -> list[m.Event]:
        async def all_done() -> None:
            while tasks := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                await asyncio.gather(*tasks, return_exceptions=True)

        for command in commands:
            self.executor.carry_out(command)
        self.loop.run_until_complete(all_done())
        assert self.executor.keeper.wait(10.0)
        found, self.events[:] = list(self.events), []
        return found


def view(name: str, cpus: float = 4.0, free: float = 4.0, gpus: float = 0.0) -> NodeView:
    return NodeView(name, f"host-{name}", cpus, gpus, free, gpus)


class Nodes:
    """A cluster whose nodes, and what their agents answer, are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.views: list[NodeView] = []
        self.drains: dict[str, float] = {}
        self.hello: dict[str, Any] = {}
        self.errors: dict[str, Exception] = {}  # by "method" or "method node"
        self.frozen: set[str] = set()  # nodes whose agents do not answer
        self.killed: list[str] = []
        self.seen: list[Any] = []  # arguments of the agents' methods
        self.restarting = False  # whether Ray says so of any agent
        self.away = 0  # calls that find no agent yet
        self.kill_answer: bool | str = True
        self.specs: dict[str, m.GenerationSpec] = {}  # by digest, once an agent has named them
        self.asked_for_specs: list[str] = []  # nodes
        self.now = 100.0
        runtime = SimpleNamespace(get_node_id=lambda: "home")
        monkeypatch.setattr(cluster_module.ray, "get_runtime_context", lambda: runtime)
        monkeypatch.setattr(cluster_module.ray, "kill", self.killed.append)
        monkeypatch.setattr(cluster_module.ray, "get_actor", self._actor)
        monkeypatch.setattr(cluster_module, "node_versions", lambda job: {"torch": "1"})
        for module in (cluster_module, greetings):
            monkeypatch.setattr(module, "living_nodes", lambda: self.views)
        monkeypatch.setattr(cluster_module, "draining_nodes", lambda: self.drains)
        monkeypatch.setattr(greetings, "restarting", lambda handle: self.restarting)
        monkeypatch.setattr(ray_calls, "UNAVAILABLE_RETRY_S", 0.0)
        monkeypatch.setattr(cluster_module, "start_agent", lambda job, node, host: self._agent(node))
        for module in (cluster_module, ray_calls, run_actors):
            monkeypatch.setattr(module, "answer", self._answer)
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1000.0)
        for module in (cluster_module, greetings, ray_calls):
            monkeypatch.setattr(module, "time", clock)
        self.cluster = Cluster(job())
        self.cluster._start = self._start_at_once  # type: ignore[method-assign]  # threads are late at times

    async def _start_at_once(self, start: Callable[..., Any], *arguments: Any) -> Any:
        return start(*arguments)

    def _actor(self, name: str, namespace: str) -> Any:
        if "ghost" in name:
            raise ValueError(name)
        return f"actor {name}"

    def _agent(self, node: str) -> Any:
        def method(name: str) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self.seen.append(arguments) or (node, name))

        def spec(term: int, digest: str) -> Any:
            self.asked_for_specs.append(node)
            return (node, "spec", self.specs.get(digest))

        methods = ("hello", "newest_term", "close", "figures", "die", "kill")
        return SimpleNamespace(**{name: method(name) for name in methods}, spec=SimpleNamespace(remote=spec))

    async def _answer(self, reference: Any, timeout_s: float | None = None) -> Any:
        node, name, *spec = reference
        if self.away and name != "hello":
            self.away -= 1
            self.now += 1.0
            raise ActorUnavailableError("x", None)
        if node in self.frozen:
            await asyncio.sleep(timeout_s or 1e9)
            raise TimeoutError
        error = self.errors.get(name, self.errors.get(f"{name} {node}"))
        if error is not None:
            raise error
        plain = {
            "workers": [],
            "busy": [],
            "spec": None,
            "metrics": {"address": node},
            "versions": {"torch": "1"},
            "facts": NodeFacts(),
        }
        found = self.hello.get(node, plain) if name in ("hello", "newest_term") else [node]
        if isinstance(found, Exception):
            raise found
        if name == "spec":
            return spec[0]
        if name == "kill":
            return self.kill_answer
        return self._named(plain | found) if name == "hello" else found

    def _named(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Put names in the place of specs, as an agent does."""
        for part in greetings.SPECS:
            spec = hello.get(part)
            if spec is not None:
                hello[part] = name_of(spec)
                self.specs[name_of(spec).digest] = spec
        return hello

    def changes(self) -> list[Any]:
        return asyncio.run(self.cluster.changes(1))

    async def kill(self, worker: str, newest: bool | None = True, term: int = 1) -> None:
        async def is_newest() -> bool | None:
            return newest

        await self.cluster.kill_worker(term, worker, is_newest)
