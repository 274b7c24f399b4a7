"""Agent, executor of commands, cluster and worker on their own, beside fakes that note what they are told."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_reader import is_pinned
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.errors import CorruptError, PicotronError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.runtime.coordinator import cluster as cluster_module
from picotron_ray.runtime.coordinator import command_executor, room_request
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.command_executor import CommandExecutor
from picotron_ray.runtime.coordinator.room_request import PATIENCE_S, RoomRequest
from picotron_ray.runtime.heartbeat import Page, process_start_ticks
from picotron_ray.runtime.node_agent import agent as agent_module
from picotron_ray.runtime.node_agent.agent import Agent, owner
from picotron_ray.runtime.ray_cluster import kept_slots
from picotron_ray.runtime.ray_cluster.names import agent_name
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds, worker_needs
from tests.support.runs.coordinator_world import job

Told = list[tuple[Any, ...]]
SHARD = Shard("w", "float32", (4,), Box((0,), (4,)))
BODY = b"all of the state"
A, B = m.GenerationId(1, 1), m.GenerationId(1, 2)
MEMBERS = (m.Member("w1", "n1"), m.Member("w2", "n2"))
SPEC = m.GenerationSpec(A, MEMBERS, Layout(dp=2), m.Source("init"), "test")


# --- agent -----------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def agent(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """An agent that looks only when it is asked to."""
    monkeypatch.setattr(Agent, "_watch", lambda self: None)
    monkeypatch.setattr(Agent, "_tell", lambda self, *words: told.append(words))
    config = job(metrics__enabled=False, elastic__hang_floor_s=1.0).model_dump(mode="json")
    return Agent(config, "n1", str(tmp_path / "night" / "n1"), "127.0.0.1")


def page_of(agent: Agent, worker: str, term: int = 1, n: int = 1) -> Page:
    page = Page(agent._folder / f"{worker}.page", agent._job.elastic)
    page.begin(term=term, n=n, rank=0, step=3)
    return page


def slot_of(agent: Agent, worker: str, step: int, n: int = 1, index: int = 0) -> Path:
    path = agent._folder / f"{worker}.{index}.slot"
    slot = SlotFile.create(path, slot_bytes([SHARD]))
    slot.write(SlotHeader(1, n, step, 0, ((0, 0, 1),)), [SHARD], [BODY], pinned=True)
    slot.close()
    return path


def test_an_agent_obeys_the_newest_term_alone(agent: Agent) -> None:
    agent.quarantine(2, "x")
    agent.quarantine(2, "y")
    for call in (
        lambda: agent.quarantine(1, "z"), lambda: agent.inventory(1), lambda: agent.kill(1, "w"),
        lambda: agent.release(1, (1, 1), 3), lambda: agent.upload(1, (1, 1), 3, ()),
    ):  # fmt: skip
        with pytest.raises(PicotronError, match="term 1 is older than 2"):
            call()
    assert agent._quarantined == {"x", "y"}


def test_an_inventory_leaves_out_what_is_damaged_or_set_aside(agent: Agent) -> None:
    good, aside, torn = (slot_of(agent, f"w{n}", 5) for n in range(3))
    torn.write_bytes(torn.read_bytes().replace(BODY, BODY[::-1]))
    agent.quarantine(1, aside.name)
    wanted = m.SlotInfo("n1", good.name, A, 5, 0, (m.Fragment(0, 0, 1),))
    assert agent.inventory(1) == (wanted,)
    assert agent.read_slot(f"../{good.name}") == good.read_bytes()


def test_a_release_unpins_and_removes_what_the_dead_left(agent: Agent) -> None:
    page_of(agent, "w1")
    mine, dead = slot_of(agent, "w1", 4), slot_of(agent, "gone", 4)
    exact, newer = slot_of(agent, "gone", 5, index=1), slot_of(agent, "gone", 6, index=2)
    other = slot_of(agent, "gone", 1, n=2, index=3)
    agent.release(1, (1, 1), 5)
    assert not dead.exists()
    assert [is_pinned(path) for path in (mine, exact, newer, other)] == [False, False, True, True]
    assert [owner(path) for path in (mine, exact)] == ["w1", "gone"]


SPEC_OF_B = m.GenerationSpec(B, (m.Member("w1", "n1"),), Layout(), m.Source("init"), "test")


def test_marked_slots_are_told_until_they_are_committed(agent: Agent) -> None:
    (agent._folder / "w1.spec").write_text(json.dumps(plain(SPEC_OF_B)))
    slot_of(agent, "w1", 6, n=2)
    kept, older = slot_of(agent, "gone", 7, n=2), slot_of(agent, "gone", 6, n=2, index=1)
    agent.keep(1, (1, 2, 7))
    info = m.SlotInfo("n1", kept.name, B, 7, 0, (m.Fragment(0, 0, 1),))
    said = agent._kept()
    assert (said["kept"], said["kept_by"]) == ((info,), SPEC_OF_B)
    with pytest.raises(PicotronError, match="older than 1"):
        agent.keep(0, (1, 2, 7))
    agent.release(1, (1, 2), 6)
    assert agent._kept()["kept"] == (info,)
    assert older.exists()
    agent.release(1, (1, 2), 7)
    assert agent._kept()["kept"] == ()
    assert not kept.exists(), "committed: its room is for others"


def test_a_living_workers_slot_is_unmarked_and_stays(agent: Agent) -> None:
    page_of(agent, "w1")
    mine = slot_of(agent, "w1", 7)
    agent.keep(1, (1, 1, 7))
    agent.release(1, (1, 1), 7)
    assert agent._kept()["kept"] == ()
    assert mine.exists()


@pytest.mark.parametrize(
    ("keep", "left"), [((1, 1, 7), {7}), ((), {6, 7}), (None, set()), ((1, 1, 9), set())]
)
def test_an_end_keeps_what_it_is_told_to(agent: Agent, keep: Any, left: set[int]) -> None:
    for index, step in enumerate((6, 7)):
        slot_of(agent, "w1", step, index=index)
    agent.close(keep)
    there = {path.name for path in agent._folder.glob("*")}
    assert there == {f"w1.{step - 6}.slot" for step in left} | ({kept_slots.MARKER} if left else set())


def test_an_end_by_hand_keeps_what_is_marked_alone(agent: Agent) -> None:
    for index, step in enumerate((6, 7)):
        slot_of(agent, "w1", step, index=index)
    agent.keep(1, (1, 1, 7))
    agent.close(kept_slots.MARKED_ALONE)
    assert {path.name for path in agent._folder.glob("*")} == {"w1.1.slot", kept_slots.MARKER}


def test_the_next_launchs_agent_takes_over_what_a_dead_node_kept(agent: Agent) -> None:
    slot_of(agent, "w1", 7)
    agent.close(())
    config = job(metrics__enabled=False).model_dump(mode="json")
    fresh = Agent(config, "n2", str(agent._folder.parent / "n2"), "127.0.0.1")
    (info,) = fresh._kept()["kept"]
    assert (info.node, info.slot, info.step) == ("n2", "w1.0.slot", 7)
    assert [slot.slot for slot in fresh.inventory(2)] == ["w1.0.slot"]
    assert not agent._folder.exists()
    fresh.close()


def test_an_exit_is_told_once(agent: Agent, told: Told) -> None:
    alive, dead = page_of(agent, "w1"), page_of(agent, "w2")
    dead.put(start_ticks=1)
    agent._look(1.0, heartbeat=False)
    assert told == [("worker_exited", "w2", "process gone")]
    told.clear()
    agent._look(1.0, heartbeat=True)
    assert [(name, node, [page["worker"] for page in pages]) for name, node, pages in told] == [
        ("heartbeat", "n1", ["w1"])
    ]
    del alive


def test_a_kill_strikes_the_process_of_the_page_alone(agent: Agent) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        page = page_of(agent, "w1")
        page.put(pid=process.pid, start_ticks=1)
        assert not agent.kill(1, "w1"), "the pid is another's by now"
        assert not agent.kill(1, "nobody")
        page.put(start_ticks=process_start_ticks(process.pid))
        assert agent.kill(1, "w1")
        assert process.wait() == -signal.SIGKILL
    assert not agent.kill(1, "w1")


def test_a_stall_is_told_once_for_each_phase(
    agent: Agent, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    excused = [True]
    monkeypatch.setattr(agent._cpu_use, "excuses", lambda *_: excused[0])
    page = page_of(agent, "w1")
    page.phase("forward")
    page.put(phase_since_s=100.0, phase_limit_s=2.0)
    agent._look(102.0, heartbeat=False)
    excused[0] = False
    agent._look(102.0, heartbeat=False)
    assert told == []
    excused[0] = True
    agent._look(103.0, heartbeat=False)
    assert told == [], "its CPU use excuses it"
    excused[0] = False
    agent._look(103.0, heartbeat=False)
    assert told == [("stalled", "w1", [1, 1], "forward", 3.0)]
    agent._look(104.0, heartbeat=False)
    assert len(told) == 1
    page.phase("backward")
    page.put(phase_since_s=104.0, phase_limit_s=2.0)
    agent._look(106.5, heartbeat=False)
    assert told[1:] == [("stalled", "w1", [1, 1], "backward", 2.5)]


def test_a_seal_is_told_once_all_members_have_it(agent: Agent, told: Told) -> None:
    first, second = page_of(agent, "w1", n=2), page_of(agent, "w2", n=2)
    page_of(agent, "old", n=1).put(pinned=3)
    one = slot_of(agent, "w1", 6, n=2)
    slot_of(agent, "w1", 6, n=1, index=1)
    slot_of(agent, "w1", 5, n=2, index=2)
    first.put(pinned=6)
    agent._look(1.0, heartbeat=False)
    assert told == []
    second.put(pinned=6)
    agent._look(1.0, heartbeat=False)
    agent._look(1.0, heartbeat=False)
    info = m.SlotInfo("n1", one.name, B, 6, 0, (m.Fragment(0, 0, 1),))
    assert told == [("sealed", "n1", (1, 2), 6, [info])]
    for page in (first, second):
        page.put(pinned=0)
    agent._look(1.0, heartbeat=False)
    assert told[1:] == [("sealed", "n1", (1, 2), 0, [])]


def test_an_agent_that_cannot_reach_the_coordinator_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    enough = threading.Event()

    def look(self: Agent, now: float, heartbeat: bool) -> None:
        looks.append(heartbeat)
        if len(looks) == 4:
            enough.set()
        raise ValueError("no such actor")

    monkeypatch.setattr(Agent, "_look", look)
    monkeypatch.setattr(agent_module, "WATCH_S", 0.01)
    config = job(metrics__enabled=False).model_dump(mode="json")
    agent = Agent(config, "n1", str(tmp_path / "night" / "n1"), "127.0.0.1")
    assert enough.wait(10)
    agent.close()
    assert looks[:4] == [True, False, False, False]
    assert not (tmp_path / "night").exists()


# --- executor --------------------------------------------------------------------------------------


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

    async def call_agent(self, node: str, method: str, *arguments: Any) -> Any:
        self.seen.append((node, method, *arguments))
        return self._next(method)

    async def call_worker(self, worker: str, method: str, *arguments: Any) -> Any:
        self.seen.append((worker, method, *arguments))
        return self._next(method)

    async def start_worker(self, worker: str, node: str) -> None:
        self._next("start")

    async def kill_worker(self, term: int, worker: str) -> None:
        self.seen.append(("kill", term, worker))

    async def store_address(self, spec: m.GenerationSpec) -> Any:
        return self._next("store")

    def agent_died(self, node: str) -> None:
        self.seen.append(("died", node))

    def workers_on(self, node: str) -> list[str]:
        return [f"{node}w"]


class Bench:
    """An executor with what it reports."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls, self.events, self.notes = Calls(), [], []
        store: Any = SimpleNamespace(
            executor=None,
            append_generation=lambda spec: m.Appended("generation", spec.id, 0, 1),
            commit=self._commit,
            collect_garbage=lambda: self.calls.seen.append(("garbage",)),
        )
        record: Any = SimpleNamespace(note=lambda *words: self.notes.append(words))
        cluster: Any = self.calls
        self.executor = CommandExecutor(self.loop, cluster, store, record, self.events.append)
        self.executor.term = 3
        self.committed: list[Any] = []
        self.seq = 7

    def _commit(self, generation: m.GenerationId, step: int, parts: list[Any]) -> m.Appended:
        self.committed.append((generation, step, parts))
        return m.Appended("commit", generation, step, self.seq)

    def run(self, *commands: m.Command) -> list[m.Event]:
        async def all_done() -> None:
            while tasks := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                await asyncio.gather(*tasks, return_exceptions=True)

        for command in commands:
            self.executor.carry_out(command)
        self.loop.run_until_complete(all_done())
        found, self.events[:] = list(self.events), []
        return found


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(command_executor, "UNAVAILABLE_RETRY_S", 0.0)
    made = Bench()
    yield made
    made.loop.run_until_complete(made.loop.shutdown_default_executor())
    made.loop.close()


def test_starts_and_kills_come_back_as_events(bench: Bench) -> None:
    assert bench.run(m.StartWorker("w1", "n1")) == [m.WorkerReady("w1", "n1")]
    bench.calls.answers["start"] = [RayError("one\nno room")]
    assert bench.run(m.StartWorker("w1", "n1")) == [m.WorkerExited("w1", "start_failed: no room")]
    bench.calls.answers["start"] = [RayError("")]
    assert bench.run(m.StartWorker("w1", "n1")) == [m.WorkerExited("w1", "start_failed: RayError")]
    assert bench.run(m.StopWorker("w1"), m.KillWorker("w2", "x")) == []
    assert bench.calls.seen == [("kill", 3, "w1"), ("kill", 3, "w2")]


def test_members_run_and_lost_replies_are_asked_for_again(bench: Bench) -> None:
    end = m.Outcome("w1", A, "finished", 9)
    bench.calls.answers = {
        "store": [ActorUnavailableError("x", None), ("h", 1)],
        "run_generation": [ActorUnavailableError("x", None), RayActorError(), end],
    }
    assert bench.run(m.RunGeneration(SPEC)) == [m.WorkerExited("w2", "process died"), end]
    assert bench.calls.seen == [(w, "run_generation", 3, SPEC, ("h", 1)) for w in ("w1", "w2", "w1")]
    bench.calls.answers = {"store": [("h", 1)], "run_generation": [RayError("a\nb"), end]}
    assert bench.run(m.RunGeneration(SPEC)) == [m.Outcome("w1", A, FailureKind.FAILED, -1, "error: b"), end]


def test_without_a_store_only_members_elsewhere_join(bench: Bench) -> None:
    bench.calls.answers = {"store": [RayError("gone")], "run_generation": [m.Outcome("w2", A, "finished", 9)]}
    assert bench.run(m.RunGeneration(SPEC)) == [
        m.NodeLost("n1", "no rendezvous store: gone"), m.Outcome("w2", A, "finished", 9)
    ]  # fmt: skip
    assert bench.calls.seen == [("died", "n1"), ("w2", "run_generation", 3, SPEC, None)]
    bench.executor.ending = True
    bench.calls.seen.clear()
    assert bench.run(m.RunGeneration(SPEC)) == []
    assert bench.calls.seen == []


def test_an_agent_without_an_answer_has_not_answered(bench: Bench) -> None:
    slot = m.SlotInfo("n1", "s", A, 3, 0, ())
    bench.calls.answers["inventory"] = [(slot,), ActorUnavailableError("x", None), RayError("x")]
    ask = m.CollectInventory("n1", 4)
    assert bench.run(ask) == [m.Inventory("n1", 4, (slot,))]
    assert bench.run(ask) == []
    assert bench.run(ask) == [m.Inventory("n1", 4, ())]


def test_uploads_are_kept_for_their_commit(bench: Bench) -> None:
    corrupt = RayError("x")
    corrupt.cause = CorruptError("s.slot", "torn")  # type: ignore[attr-defined]
    where = corrupt.cause.where  # type: ignore[attr-defined]
    bench.calls.answers["upload"] = [{"part": 1}, corrupt, RayError("down"), {"part": 2}]
    upload = m.Upload("n1", A, 5, ("s",))
    found = [bench.run(upload)[0], bench.run(upload)[0], bench.run(upload)[0]]
    assert found == [m.Uploaded("n1", A, 5, error) for error in ("", f"corrupt:{where}", "down")]
    assert bench.calls.seen == [("n1", "upload", 3, (1, 1), 5, ("s",))] * 3
    bench.run(replace(upload, node="n2", step=6))
    bench.calls.seen.clear()
    bench.seq = 0
    assert bench.run(m.AppendCommit(A, 5, ("n1", "n9"))) == [m.Appended("commit", A, 5, 0)]
    bench.seq = 7
    assert bench.run(m.AppendCommit(A, 5, ("n1",))) == [m.Appended("commit", A, 5, 7)]
    assert bench.calls.seen == [("garbage",)], "only after a commit that was made"
    bench.run(m.AppendCommit(A, 5, ("n1",)), m.AppendCommit(A, 6, ("n2",)))
    assert bench.committed == [
        (A, 5, [{"part": 1}]), (A, 5, [{"part": 1}]), (A, 5, []), (A, 6, [{"part": 2}])
    ]  # fmt: skip
    assert bench.run(m.AppendGeneration(SPEC)) == [m.Appended("generation", A, 0, 1)]


def test_orders_go_to_those_that_they_name(bench: Bench) -> None:
    bench.calls.answers["release"] = [RayError("x")]
    bench.calls.answers["quarantine"] = [RayError("x")]
    bench.calls.answers["interrupt"] = [RayError("x")]
    orders = (
        m.Interrupt("w1", A, "hard"), m.TakeSnapshot(A, ("w1", "w2")), m.Release("n1", A, 5, 4),
        m.Quarantine("n1", "s"), m.Alert("warning", "text", "kind", {"x": 1}),
    )  # fmt: skip
    assert bench.run(*orders) == []
    assert bench.calls.seen == [
        ("w1", "interrupt", 3, (1, 1), "hard"),
        ("w1", "interrupt", 3, (1, 1), "snapshot"),
        ("w2", "interrupt", 3, (1, 1), "snapshot"),
        ("n1", "release", 3, (1, 1), 5),
        ("n1w", "committed", 3, (1, 1), 4),
        ("n1", "quarantine", 3, "s"),
    ]
    assert bench.notes == [("warning", "kind", "text", {"x": 1})]


def test_a_task_that_fails_is_noted(bench: Bench) -> None:
    bench.calls.answers["start"] = [RuntimeError("boom")]
    assert bench.run(m.StartWorker("w1", "n1")) == []
    assert bench.notes == [("error", "internal", "coordinator: RuntimeError('boom')")]
    assert bench.executor._tasks == set()


# --- room ------------------------------------------------------------------------------------------


def test_room_is_asked_for_once_it_is_missed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Told = []
    placed = [False]

    def group(bundles: Any, strategy: str) -> Any:
        told.append(("ask", bundles, strategy))
        return SimpleNamespace(ready=lambda: "ready")

    monkeypatch.setattr(room_request, "placement_group", group)
    monkeypatch.setattr(room_request, "remove_placement_group", lambda group: told.append(("remove",)))
    monkeypatch.setattr(
        room_request.ray, "wait", lambda refs, timeout: (refs, []) if placed[0] else ([], refs)
    )
    room, needs = RoomRequest(), WorkerNeeds(2.0, 0.0)
    room.update(2, needs, 10.0)
    room.update(2, needs, 10.0 + PATIENCE_S - 0.1)
    assert told == []
    room.update(2, needs, 10.0 + PATIENCE_S)
    room.update(2, needs, 30.0)
    assert told == [("ask", [{"CPU": 2.0}] * 2, "PACK")]
    room.update(3, WorkerNeeds(2.0, 1.0), 31.0)
    assert told[1:] == [("remove",), ("ask", [{"CPU": 2.0, "GPU": 1.0}] * 3, "PACK")]
    placed[0] = True
    room.update(3, needs, 32.0)
    placed[0] = False
    assert told[3:] == [("remove",)]
    room.update(3, needs, 32.1)
    room.update(3, needs, 32.0 + PATIENCE_S)
    assert len(told) == 4, "it waits anew"
    room.update(3, needs, 32.1 + PATIENCE_S)
    assert len(told) == 5
    room.update(0, needs, 60.0)
    room.update(1, needs, 60.1)
    room.update(1, needs, 60.0 + PATIENCE_S)
    assert told[5:] == [("remove",)]
    room.clear()
    assert len(told) == 6
    room.update(1, WorkerNeeds(0.0, 0.0), 90.0)
    assert len(told) == 6, "nothing to ask for"


# --- cluster ---------------------------------------------------------------------------------------


def view(name: str, cpus: float = 4.0, free: float = 4.0, gpus: float = 0.0) -> NodeView:
    return NodeView(name, f"host-{name}", cpus, gpus, free, gpus)


def test_workers_that_fit_are_counted_by_what_they_need() -> None:
    node = NodeView("n", "h", 9.0, 2.0, 5.0, 1.0)
    assert (node.capacity(WorkerNeeds(2.0, 0.0)), node.room(WorkerNeeds(2.0, 0.0))) == (4, 2)
    assert (node.capacity(WorkerNeeds(2.0, 1.0)), node.room(WorkerNeeds(0.0, 1.0))) == (2, 1)
    assert node.capacity(WorkerNeeds(0.0, 0.0)) == 1 << 30
    auto = job().cluster
    cuda, cpu = (auto.model_copy(update={"device": device}) for device in ("cuda", "cpu"))
    per = auto.cpus_per_worker
    found = [worker_needs(c, nodes) for c in (auto, cuda, cpu) for nodes in ([], [view("a", gpus=1.0)])]
    assert found == [WorkerNeeds(per, gpus) for gpus in (0.0, 1.0, 1.0, 1.0, 0.0, 0.0)]


class Nodes:
    """A cluster whose nodes, and what their agents answer, are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.views: list[NodeView] = []
        self.drains: dict[str, float] = {}
        self.hello: dict[str, Any] = {}
        self.killed: list[str] = []
        self.seen: list[Any] = []  # arguments of the agents' methods
        self.now = 100.0
        runtime = SimpleNamespace(get_node_id=lambda: "home")
        monkeypatch.setattr(cluster_module.ray, "get_runtime_context", lambda: runtime)
        monkeypatch.setattr(cluster_module.ray, "kill", self.killed.append)
        monkeypatch.setattr(cluster_module.ray, "get_actor", self._actor)
        monkeypatch.setattr(cluster_module, "node_versions", lambda job: {"torch": "1"})
        monkeypatch.setattr(cluster_module, "living_nodes", lambda: self.views)
        monkeypatch.setattr(cluster_module, "draining_nodes", lambda: self.drains)
        monkeypatch.setattr(cluster_module, "start_agent", lambda job, node, host: self._agent(node))
        monkeypatch.setattr(cluster_module, "answer", self._answer)
        monkeypatch.setattr(
            cluster_module, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1000.0)
        )
        self.cluster = Cluster(job())

    def _actor(self, name: str, namespace: str) -> Any:
        if "ghost" in name:
            raise ValueError(name)
        return f"actor {name}"

    def _agent(self, node: str) -> Any:
        def method(name: str) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self.seen.append(arguments) or (node, name))

        return SimpleNamespace(
            **{name: method(name) for name in ("hello", "close", "figures", "die", "kill")}
        )

    async def _answer(self, reference: Any, timeout_s: float | None = None) -> Any:
        node, name = reference
        plain = {
            "workers": [],
            "metrics": {"address": node},
            "versions": {"torch": "1"},
            "facts": NodeFacts(),
        }
        found = self.hello.get(node, plain) if name == "hello" else [node]
        if isinstance(found, Exception):
            raise found
        return plain | found if name == "hello" else found

    def changes(self) -> list[Any]:
        return asyncio.run(self.cluster.changes(1))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


def test_nodes_come_the_coordinators_own_first_and_go(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("home"), view("full", free=0.5)]
    assert nodes.changes() == [m.NodeJoined("home", 4), m.NodeJoined("a", 4)]
    assert nodes.changes() == []
    nodes.views = [view("home"), view("full", free=1.0)]
    assert nodes.changes() == [m.NodeLost("a", "Ray reports it dead"), m.NodeJoined("full", 1)]
    assert nodes.cluster.metrics == {"home": {"address": "home"}, "full": {"address": "full"}}


def test_a_node_with_other_versions_says_so_and_is_not_counted(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.hello["a"] = {"versions": {"torch": "2"}}
    assert nodes.changes() == [m.NodeJoined("a", 4, "torch 2 (expected 1)")]
    nodes.views = [view("a", free=2.0)]
    assert nodes.changes() == []


def test_room_that_others_take_and_give_is_told(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.changes()
    nodes.cluster._placed = {"w1": "a", "w2": "b"}
    nodes.views = [view("a", free=3.0)]
    assert nodes.changes() == [], "one worker of ours"
    nodes.views = [view("a", free=2.0)]
    assert nodes.changes() == [m.NodeJoined("a", 3)]
    nodes.cluster.gone("w1")
    assert nodes.changes() == [m.NodeJoined("a", 2)]


def test_only_silent_agents_are_asked_whether_they_live(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.changes()
    nodes.changes()  # from now on they are silent
    beats_s = cluster_module.SILENT_BEATS * job().elastic.heartbeat_s
    nodes.hello = {"a": RayActorError(), "b": TimeoutError()}
    nodes.now += beats_s - 0.1
    assert nodes.changes() == []
    nodes.cluster.heard("b")
    nodes.now += 0.1
    nodes.hello["b"] = RayActorError()
    assert nodes.changes()[0] == m.NodeLost("a", "its agent died")
    nodes.hello["b"] = ActorUnavailableError("x", None)
    nodes.now += beats_s
    assert nodes.changes() == []


def test_strangers_on_a_node_are_ready_workers(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.hello["a"] = {"workers": ["w1", "ghost"]}
    assert nodes.changes() == [
        m.NodeJoined("a", 4), m.WorkerReady("w1", "a"), m.WorkerReady("ghost", "a")
    ]  # fmt: skip
    assert nodes.cluster.workers_on("a") == ["w1"]
    assert nodes.cluster._placed == {"w1": "a"}
    asyncio.run(nodes.cluster.kill_worker(1, "w1"))
    assert (len(nodes.killed), nodes.cluster.workers_on("a"), nodes.cluster._placed) == (1, [], {})


def test_a_drain_is_told_once_in_our_own_time(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.drains = {"a": 1030.0, "b": 0.0, "c": 5.0}
    joined = [m.NodeJoined("a", 4), m.NodeJoined("b", 4)]
    assert nodes.changes() == [*joined, m.DrainNotice("a", 130.0), m.DrainNotice("b", 0.0)]
    assert nodes.changes() == []


def test_a_fault_unplugs_the_node_of_its_number(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.changes()
    told: list[str] = []
    for node, handle in nodes.cluster._agents.items():
        monkeypatch.setattr(handle, "die", SimpleNamespace(remote=lambda node=node: told.append(node)))
    for index in (1, 2, 0):
        nodes.cluster.remove_node(index)
    assert told == ["b", "a"]


def test_an_end_closes_all_there_is(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.hello["a"] = {"workers": ["w1"]}
    nodes.changes()
    assert asyncio.run(nodes.cluster.figures()) == {"a": ["a"], "b": ["b"]}
    asyncio.run(nodes.cluster.close(1))
    assert len(nodes.killed) == 3
    assert nodes.seen[-2:] == [(None,)] * 2
    asyncio.run(nodes.cluster.close(1, finished=False))
    assert nodes.seen[-2:] == [(kept_slots.MARKED_ALONE,)] * 2, "what is marked is not committed"
    asyncio.run(nodes.cluster.close(1, m.Source("slots", 7, B)))
    assert nodes.seen[-2:] == [((1, 2, 7),)] * 2
    asyncio.run(nodes.cluster.close(1, m.Source("slots")))
    assert nodes.seen[-2:] == [((),)] * 2


def test_what_agents_and_workers_do_is_told_without_a_term(nodes: Nodes) -> None:
    nodes.views = [view("ghost")]
    assert asyncio.run(nodes.cluster.activity()) == "none"
    nodes.views = [view("a")]
    phases = [{"phase": "idle"}]

    async def figures() -> Any:
        return {"a": phases}

    nodes.cluster.figures = figures  # type: ignore[method-assign]
    assert asyncio.run(nodes.cluster.activity()) == "idle"
    phases.append({"phase": "forward"})
    assert asyncio.run(nodes.cluster.activity()) == "training"


def test_slots_that_a_node_kept_are_told_when_it_joins(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    info = m.SlotInfo("a", "s", A, 3, 0, ())
    nodes.hello["a"] = {"kept": (info,), "kept_by": SPEC}
    assert nodes.changes() == [m.NodeJoined("a", 4, kept=(info,), kept_by=SPEC)]


def test_a_node_that_is_gone_is_forgotten_as_a_whole(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.hello = {"a": {"workers": ["w1"]}, "b": {"workers": ["w2"]}}
    nodes.changes()
    nodes.cluster.heard("a")
    nodes.cluster.agent_died("a")
    nodes.cluster.agent_died("a")
    found = nodes.cluster
    assert (found._order, list(found._agents), found._capacity) == (["b"], ["b"], {"b": 4})
    assert (found._placed, list(found._workers), list(found.metrics)) == ({"w2": "b"}, ["w2"], ["b"])
    assert "a" not in found._heard
    assert nodes.changes()[0] == m.NodeJoined("a", 4), "a fresh agent"


def test_calls_reach_the_handle_that_they_name(nodes: Nodes) -> None:
    def call(work: Any) -> Any:
        return asyncio.run(work)

    cluster = nodes.cluster
    with pytest.raises(RayError, match="node 0123abcd has no agent"):
        call(cluster.call_agent("0123abcdef", "kill"))
    with pytest.raises(RayActorError, match="worker w1 is gone"):
        call(cluster.call_worker("w1", "kill"))
    cluster._agents["n1"] = cluster._workers["w1"] = nodes._agent("n1")
    assert call(cluster.call_agent("n1", "figures")) == ["n1"]
    assert call(cluster.call_worker("w1", "close")) == ["n1"]
    nodes.hello["n2"] = {"pid": 7}
    cluster._agents["n2"] = nodes._agent("n2")
    assert call(cluster.call_agent("n2", "hello"))["pid"] == 7


def test_living_agents_are_greeted(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def actor(name: str, namespace: str) -> Any:
        if "ghost" in name:
            raise ValueError(name)
        return nodes._agent("a" if name == agent_name("run", "a") else "b")

    nodes.cluster._job = job(name="run")
    nodes.views = [view("ghost"), view("a"), view("b")]
    nodes.hello["b"] = RayError("it died")
    monkeypatch.setattr(cluster_module.ray, "get_actor", actor)
    found = asyncio.run(nodes.cluster.hello(1))
    assert list(found) == list(nodes.cluster._agents) == ["a"]
    assert nodes.cluster.metrics == {"a": {"address": "a"}}


def test_a_store_is_asked_for_where_rank_0_is(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call_agent(node: str, method: str) -> Any:
        return [f"{method} at {node}", 9]

    monkeypatch.setattr(nodes.cluster, "call_agent", call_agent)
    assert asyncio.run(nodes.cluster.store_address(SPEC)) == ("store_address at n1", 9)


def test_the_needs_are_found_again_until_there_are_gpus(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.changes()
    assert nodes.cluster.needs.gpus == 0.0
    nodes.views = [view("a"), view("b", gpus=1.0)]
    nodes.changes()
    assert nodes.cluster.needs.gpus == 1.0
    nodes.views = [view("a")]
    nodes.changes()
    assert nodes.cluster.needs.gpus == 1.0, "they may come back"
