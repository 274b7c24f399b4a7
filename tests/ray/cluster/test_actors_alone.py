"""A worker and the coordinator's actor without their constructors: what they refuse, repeat and hand on."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode_spec
from picotron_ray.errors import PicotronError, StorageError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator import actor as actor_module
from picotron_ray.runtime.coordinator.actor import Coordinator, event_log_lines
from picotron_ray.runtime.coordinator.followers import Followers
from picotron_ray.runtime.ray_cluster.connect import run_folders
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, coordinator_name
from picotron_ray.runtime.worker import worker as worker_module
from picotron_ray.runtime.worker.worker import Worker
from picotron_ray.train.step_sync import SNAPSHOT, STOP
from tests.support.runs.coordinator_world import job

A, B, C = (m.GenerationId(1, n) for n in (1, 2, 3))


def spec(id_: m.GenerationId) -> m.GenerationSpec:
    return m.GenerationSpec(id_, (m.Member("w1", "n1"),), Layout(), m.Source("init"), "test")


class Run:
    """A generation that is over as soon as it is run, unless it waits."""

    waits = False

    def __init__(self, resources: Any, spec: m.GenerationSpec, store: tuple[str, int]) -> None:
        self.spec, self.store, self.rank = spec, store, 4
        self.done, self.told = threading.Event(), []
        self.outcome = m.Outcome("w1", spec.id, "finished", 9)

    def run(self) -> None:
        if not self.waits:
            self.done.set()

    def interrupt(self, flag: Any) -> None:
        self.told.append(flag)
        self.done.set()

    def committed(self, step: int) -> None:
        self.told.append(step)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(worker_module, "GenerationRun", Run)
    monkeypatch.setattr(Run, "waits", False)
    made: Any = Worker.__new__(Worker)
    made._lock, made._term, made._run = threading.Lock(), 0, None
    made._chaos = SimpleNamespace(rank=-1)
    made._resources = SimpleNamespace(worker="w1", folder=tmp_path, data=SimpleNamespace(fingerprint="f"))
    return made


STORE = ("h", 1)


def failed(kind: Any, id_: m.GenerationId, detail: str) -> m.Outcome:
    return m.Outcome("w1", id_, kind, -1, detail)


def test_a_worker_runs_once_repeats_its_outcome_and_refuses_older_ones(worker: Any, tmp_path: Path) -> None:
    assert worker.ready() == "f"
    assert worker.run_generation(2, spec(B), None) == failed(FailureKind.PEER_LOST, B, "no rendezvous store")
    assert worker.run_generation(2, spec(B), STORE) == m.Outcome("w1", B, "finished", 9)
    first = worker._run
    assert (first.store, worker._chaos.rank, first.told) == (STORE, 4, [])
    assert decode_spec(json.loads((tmp_path / "w1.spec").read_text())) == spec(B)
    assert worker.run_generation(2, spec(B), None) == first.outcome, "joined"
    assert worker._run is first
    old = failed(FailureKind.FAILED, A, "refused: older term")
    assert worker.run_generation(2, spec(A), STORE) == old
    assert worker.run_generation(1, spec(C), STORE) == replace_id(old, C)
    assert worker._run is first
    assert worker.run_generation(2, spec(C), STORE).generation == C
    assert first.told == [], "it was over"
    assert (worker._run.spec.id, worker._term) == (C, 2)


def replace_id(outcome: m.Outcome, id_: m.GenerationId) -> m.Outcome:
    return m.Outcome(outcome.worker, id_, outcome.kind, outcome.step, outcome.detail)


def test_a_new_generation_ends_one_that_still_runs(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "waits", True)
    worker.run_generation(1, spec(A), STORE)
    first = worker._run
    worker.run_generation(2, spec(B), STORE)
    assert first.told == [None]


def test_orders_reach_the_generation_that_they_name_while_it_runs(worker: Any) -> None:
    assert not worker.interrupt(1, (1, 1), "hard"), "there is none"
    run = worker._run = Run(None, spec(A), STORE)
    assert not worker.interrupt(1, (1, 2), "hard")
    assert worker.committed(1, (1, 1), 5)
    run.done.clear()
    assert worker.interrupt(2, (1, 1), "boundary")
    run.done.clear()
    assert worker.interrupt(2, (1, 1), "snapshot")
    run.done.clear()
    assert not worker.interrupt(1, (1, 1), "hard"), "an older term"
    assert not worker.committed(1, (1, 1), 6)
    assert worker.interrupt(2, (1, 1), "hard")
    assert run.told == [5, STOP, SNAPSHOT, None]
    assert not worker.committed(2, (1, 1), 7), "it is over"


# --- coordinator -----------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An actor whose loop runs what it is given at once, and whose parts note what they are told."""
    told: list[Any] = []

    def note(*words: Any) -> None:
        told.append(words)

    made: Any = Coordinator.__new__(Coordinator)
    made.told = told
    made.commands = []
    made._loop = SimpleNamespace(call_soon_threadsafe=lambda call, *arguments: call(*arguments))
    made._executor = SimpleNamespace(
        ending=False,
        term=2,
        spawn=lambda work: (work.close(), note("spawn", work.__name__)),
        carry_out=lambda command: note("carry out", command),
    )
    made._cluster = SimpleNamespace(
        gone=lambda worker: note("gone", worker), heard=lambda node: note("heard", node)
    )
    made._machine = SimpleNamespace(handle=lambda event, now: note("event", event) or list(made.commands))
    made._record = SimpleNamespace(
        observe=lambda event, commands, at_s: None,
        figures=lambda node, figures: note("figures", node, len(figures)),
        attached=lambda submission: note("attached", submission),
        status=lambda since: {"since": since, "done": since > 5},
    )
    made._tracking = SimpleNamespace(observe=lambda event, commands: note("tracked", event))
    made._chaos = SimpleNamespace(reached=lambda step: note("reached", step))
    made._followers = Followers()
    made._event_log = tmp_path / "events-2.jsonl"
    return made


def events(coordinator: Any) -> list[Any]:
    found = [words[1] for words in coordinator.told if words[0] == "event"]
    coordinator.told.clear()
    return found


def test_what_is_heard_becomes_an_event(coordinator: Any) -> None:
    coordinator.request("stop")
    coordinator.stalled("w1", [1, 2], "reduce", 1.5)
    coordinator.sealed("n1", (1, 2), 5, [])
    assert [words[0] for words in coordinator.told] == ["event", "tracked"] * 3
    assert events(coordinator) == [
        m.UserRequest("stop"), m.Stalled("w1", B, "reduce", 1.5), m.SnapshotSealed("n1", B, 5, ())
    ]  # fmt: skip
    assert len(coordinator._event_log.read_text().splitlines()) == 3
    coordinator.worker_exited("w1", "process gone")
    assert coordinator.told[0] == ("gone", "w1")
    assert events(coordinator) == [m.WorkerExited("w1", "process gone")]


def test_nothing_is_handled_before_a_term_or_at_the_end(coordinator: Any) -> None:
    coordinator._executor.ending = True
    coordinator.request("stop")
    coordinator._executor.ending, coordinator._executor.term = False, 0
    coordinator.worker_exited("w1", "x")
    assert coordinator.told == []
    coordinator._executor.term, coordinator._tracking = 1, None
    coordinator.request("stop")
    assert coordinator.told == [("event", m.UserRequest("stop"))]


def test_commands_are_carried_out_and_the_end_begins(coordinator: Any) -> None:
    stop = m.StopWorker("w1")
    coordinator.commands = [stop, m.Finish("finished", ""), stop]
    coordinator.request("stop")
    assert coordinator.told[2:] == [("carry out", stop), ("spawn", "_end"), ("carry out", stop)]


def test_a_heartbeat_tells_the_steps_of_the_newest_generation(coordinator: Any) -> None:
    pages = [
        {"term": 1, "n": 2, "worker": "a", "step": 7},
        {"term": 1, "n": 2, "worker": "b", "step": 8},
        {"term": 1, "n": 1, "worker": "old", "step": 9},
        {"term": 0, "n": 0, "worker": "idle", "step": 0},
    ]
    coordinator.heartbeat("n1", pages)
    assert coordinator.told == [
        ("heard", "n1"),
        ("figures", "n1", 4),
        ("event", m.Heartbeat("n1", B, {"a": 7, "b": 8})),
        ("tracked", m.Heartbeat("n1", B, {"a": 7, "b": 8})),
        ("reached", 8),
    ]
    coordinator.told.clear()
    coordinator.heartbeat("n1", pages[3:])
    assert coordinator.told[2:] == [
        ("event", m.Heartbeat("n1", None, {})), ("tracked", m.Heartbeat("n1", None, {})), ("reached", 0)
    ]  # fmt: skip


def test_a_status_says_how_many_others_wait(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "time", SimpleNamespace(monotonic=lambda: 1.0, time=lambda: 1.0))
    assert coordinator.status() == {"since": 0, "done": False}
    assert coordinator.status(1, "a") == {"since": 1, "done": False, "waiting": 0}
    assert coordinator.status(1, "b")["waiting"] == 1
    assert coordinator.status(6, "a") == {"since": 6, "done": True, "waiting": 1}
    coordinator.attached({"submission_id": "x"})
    assert coordinator.told == [("attached", {"submission_id": "x"})]


# --- its begin and its end -------------------------------------------------------------------------


class Store:
    """A store that answers as it is told."""

    commit_figures: Any = "figures of commits"

    def __init__(self, told: list[Any]) -> None:
        self.told, self.term, self.error = told, 2, None
        self.news, self.complaints = ["started from x"], ["slow"]

    def claim(self) -> int:
        if self.error is not None:
            raise self.error
        return self.term

    def state(self, read_generations: bool) -> Any:
        self.told.append(("state", read_generations))
        return (m.Commit(5, A, "five", 1),), (spec(A),)

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {**summary, "kept": True}


@pytest.fixture
def whole(coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A coordinator with all that its begin and its end need."""
    told = coordinator.told

    def note(name: str, answer: Any = None) -> Any:
        return lambda *words: told.append((name, *words)) or answer

    def note_async(name: str, answer: Any = None) -> Any:
        async def call(*words: Any) -> Any:
            told.append((name, *words))
            return answer

        return call

    coordinator.agents = {}
    coordinator._job = job()
    coordinator._options = {"event_folder": str(tmp_path / "run" / "events"), "owns_ray": True}
    coordinator._device = "cpu"
    coordinator._store = Store(told)
    coordinator._executor.term = 0
    for name, answer in {"summary": {"status": "s"}, "recall": None, "begin": None, "done": None}.items():
        setattr(coordinator._record, name, note(name, answer))
    coordinator._record.note = note("note")
    coordinator._cluster.activity = note_async("activity", "none")
    coordinator._cluster.hello = note_async("hello", coordinator.agents)
    coordinator._cluster.close = note_async("close")
    coordinator._cluster.figures = note_async("ask figures", {"n1": [1, 2]})
    coordinator._cluster.adopt_workers = note("adopt")
    tracking = SimpleNamespace(observe=lambda event, _: note("tracked")(event), finish=note_async("track"))
    monkeypatch.setattr(actor_module, "Tracking", lambda *_: tracking)
    monkeypatch.setattr(actor_module, "LINGER_S", 0.0)
    monkeypatch.setattr(actor_module.local_ray, "announce_end", note("announce end"))
    monkeypatch.setattr(actor_module.kept_slots, "discard", note("discard"))
    monkeypatch.setattr(actor_module.ray, "get_actor", lambda name, namespace: (name, namespace))
    monkeypatch.setattr(actor_module.ray, "kill", note("kill"))
    return coordinator


def begin(coordinator: Any) -> list[Any]:
    coordinator.told.clear()
    asyncio.run(coordinator._begin())
    return list(coordinator.told)


def test_a_first_coordinator_begins_with_nothing(whole: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "events"
    folder.mkdir(parents=True)
    for name in ("events-7.jsonl", "notes.txt"):
        (folder / name).write_text("{}\n{}\n")
    whole._store.term = 1
    whole._options["notes"] = ["hint"]
    begun = m.Begin(1, (m.Commit(5, A, "five", 1),), (spec(A),), None, (), ())
    assert begin(whole) == [
        ("hello", 1),
        ("state", True),
        ("recall", []),
        ("begin", 1, "figures of commits"),
        ("note", "info", "launch", "hint"),
        ("note", "info", "init-from", "started from x"),
        ("note", "warning", "storage", "slow"),
        ("adopt", ()),
        ("event", begun),
        ("tracked", begun),
        ("spawn", "_tick"),
        ("spawn", "_watch_nodes"),
        ("spawn", "_serve_metrics"),
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["events-1.jsonl", "notes.txt"]
    head, line = (folder / "events-1.jsonl").read_text().splitlines()
    assert json.loads(head)["planner"] == {"device": "cpu"}
    assert json.loads(line)["event"]["type"] == "Begin"


def test_a_later_coordinator_adopts_what_runs(whole: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "events"
    folder.mkdir(parents=True)
    (folder / "events-1.jsonl").write_text('{}\n{"old": 1}\n')
    whole._job = job(metrics__enabled=False)
    whole.agents.update(
        n1={"spec": spec(A), "workers": ["w1", "w2"], "busy": [("w1", 1, 2)]},
        n2={"spec": spec(B), "workers": ["w3"], "busy": []},
        n3={"spec": None, "workers": [], "busy": []},
    )
    told = begin(whole)
    workers = (m.Member("w1", "n1"), m.Member("w2", "n1"), m.Member("w3", "n2"))
    begun = m.Begin(2, (m.Commit(5, A, "five", 1),), (spec(A),), spec(B), workers, (m.BusyWorker("w1", B),))
    assert ("state", False) in told, "the agents know the generations"
    assert ("recall", [{"old": 1}]) in told
    assert ("adopt", workers) in told
    assert ("event", begun) in told
    assert told[-1] == ("spawn", "_watch_nodes"), "no metrics were asked for"
    assert sorted(path.name for path in folder.iterdir()) == ["events-1.jsonl", "events-2.jsonl"]


@pytest.mark.parametrize(
    ("error", "status"), [(StorageError("down"), "storage"), (PicotronError("down"), "failed")]
)
def test_a_coordinator_that_cannot_begin_ends(whole: Any, error: Exception, status: str) -> None:
    whole._store.error = error
    ended: list[m.Finish] = []

    async def end(finish: m.Finish) -> None:
        ended.append(finish)

    whole._end = end
    begin(whole)
    assert ended == [m.Finish(status, "down", m.Source("slots"))], "whatever a coordinator before it left"


def end(coordinator: Any, status: Any) -> list[Any]:
    coordinator.told.clear()
    finish = m.Finish(status, "why")
    asyncio.run(coordinator._end(finish))
    assert coordinator._executor.ending
    assert coordinator.told[:2] == [("ask figures",), ("figures", "n1", 2)]
    return [words for words in coordinator.told[2:] if words != ("summary", finish)]


def test_an_end_closes_all_and_is_kept(whole: Any, tmp_path: Path) -> None:
    begin(whole)
    file = tmp_path / "run" / "prometheus_targets.json"
    file.write_text("[]")
    finish = m.Finish("finished", "why")
    assert end(whole, "finished") == [
        ("close", 2, None, True), ("track",), ("done", finish, {"status": "s", "kept": True}),
        ("discard", run_folders(whole._job)), ("announce end",)
    ]  # fmt: skip
    assert not file.exists()
    whole._options["owns_ray"] = False
    whole._tracking = None
    assert end(whole, "finished") == [
        ("close", 2, None, True),
        ("done", finish, {"status": "s", "kept": True}),
        ("kill", (coordinator_name(whole._job.name), NAMESPACE)),
    ]


@pytest.mark.parametrize(("status", "closed"), [("storage", [("close", 2, None, False)]), ("fenced", [])])
def test_an_end_without_storage_leaves_the_record_to_others(
    whole: Any, tmp_path: Path, status: Any, closed: list[Any]
) -> None:
    begin(whole)
    file = tmp_path / "run" / "prometheus_targets.json"
    file.write_text("[]")
    done = ("done", m.Finish(status, "why"), {"status": "s"})
    assert end(whole, status) == [*closed, done, ("announce end",)]
    assert file.exists()


def test_an_end_keeps_what_its_decision_says(whole: Any) -> None:
    begin(whole)
    whole.told.clear()
    keep = m.Source("slots", 7, A)
    asyncio.run(whole._end(m.Finish("storage", "why", keep)))
    assert ("close", 2, keep, False) in whole.told
    asyncio.run(whole._end(m.Finish("stopped", "before anything was taken up")))
    assert whole.told.count(("close", 2, None, False)) == 1
    assert not [words for words in whole.told if words[0] == "discard"]


def test_an_end_survives_that_its_summary_is_not_kept(whole: Any) -> None:
    begin(whole)
    whole._store.error = StorageError("down")
    assert end(whole, "failed")[1:] == [
        ("track",), ("done", m.Finish("failed", "why"), {"status": "s"}), ("announce end",)
    ]  # fmt: skip


def test_an_orphan_is_stopped_until_it_is_done(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(whole)
    whole.told.clear()
    gone, done = iter([False, False, True]), iter([False, False, True])
    asked: list[Any] = []
    monkeypatch.setattr(
        actor_module.owner_process, "is_gone", lambda process: asked.append(process) or next(gone)
    )
    monkeypatch.setattr(actor_module.owner_process, "POLL_S", 0.0)
    whole._record.status = lambda since: asked.append(since) or {"done": next(done)}
    asyncio.run(whole._end_with({"pid": 7}))
    assert asked == [{"pid": 7}] * 3 + [0] * 3
    reason = "the process that asked for this run is gone: stopping it"
    assert whole.told[0] == ("note", "warning", "orphaned", reason)
    assert events(whole) == [m.UserRequest("stop")] * 2


def test_time_and_nodes_become_events_until_the_end(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(whole)
    monkeypatch.setattr(actor_module, "TICK_S", 0.0)
    monkeypatch.setattr(actor_module, "NODE_POLL_S", 0.0)
    room: list[Any] = []
    request = SimpleNamespace(
        update=lambda missing, needs, now: room.append((missing, needs)), clear=lambda: room.append("clear")
    )
    monkeypatch.setattr(actor_module, "RoomRequest", lambda: request)
    rounds = [0]

    def count(limit: int) -> None:
        rounds[0] += 1
        whole._executor.ending = rounds[0] == limit

    async def changes(term: int) -> list[m.Event]:
        count(2)
        return [m.NodeLost(f"n{term}{rounds[0]}", "gone")]

    whole._cluster.changes, whole._cluster.needs = changes, "needs"
    whole._machine.view = SimpleNamespace(missing=3)
    for autoscale, asked in ((True, [(3, "needs"), (3, "needs"), "clear"]), (False, ["clear"])):
        whole._job = job(cluster__autoscale=autoscale)
        whole._executor.ending, rounds[0] = False, 0
        whole.told.clear()
        room.clear()
        asyncio.run(whole._watch_nodes())
        assert events(whole) == [m.NodeLost("n21", "gone")], "the second round comes too late to be handled"
        assert room == asked
    whole._executor.ending, rounds[0] = False, 0
    whole._machine.handle = lambda event, now: whole.told.append(("event", event)) or count(3) or []
    asyncio.run(whole._tick())
    assert events(whole) == [m.Tick()] * 3


def test_event_logs_are_read_in_the_order_of_their_terms(tmp_path: Path) -> None:
    for term in (10, 9, 1):
        lines = [{"head": term}, {"line": term, "at": 1}, {"line": term, "at": 2}]
        (tmp_path / f"events-{term}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [(line["line"], line["at"]) for line in event_log_lines(tmp_path)] == [
        (1, 1), (1, 2), (9, 1), (9, 2), (10, 1), (10, 2)
    ]  # fmt: skip
