"""A worker and the coordinator's actor without their constructors: what they refuse, repeat and hand on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode_spec
from picotron_ray.coordinator.replay import unseal
from picotron_ray.errors import FencedError, PicotronError, StorageError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator import actor as actor_module
from picotron_ray.runtime.coordinator import closing, owner_watch, supervision
from picotron_ray.runtime.coordinator.actor import Coordinator
from picotron_ray.runtime.coordinator.beat_groups import BeatGroups
from picotron_ray.runtime.coordinator.beginning import EarlyEvents
from picotron_ray.runtime.coordinator.event_log.files import LoggedLine
from picotron_ray.runtime.coordinator.evidence import Evidence
from picotron_ray.runtime.coordinator.followers import Followers
from picotron_ray.runtime.coordinator.heartbeat_pages import read_heartbeat
from picotron_ray.runtime.coordinator.supervision import Supervisor
from picotron_ray.runtime.coordinator.telemetry import RunTelemetry
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
    made._lock, made._term, made._run, made._joins = threading.Lock(), 0, None, 0
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
    old = failed(FailureKind.FAILED, A, "refused: 1.1 is older than 1.2")
    assert worker.run_generation(2, spec(A), STORE) == old
    with pytest.raises(FencedError, match="term 1 is older than 2"):
        worker.run_generation(1, spec(C), STORE)
    assert worker._run is first
    assert worker.run_generation(2, spec(C), STORE).generation == C
    assert first.told == [], "it was over"
    assert (worker._run.spec.id, worker._term) == (C, 2)


def test_a_spec_that_cannot_be_written_costs_no_generation(
    worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full file system: what is lost is that a coordinator which restarts finds it here."""
    worker._resources.folder = tmp_path / "gone"
    assert worker.run_generation(2, spec(B), STORE) == m.Outcome("w1", B, "finished", 9)
    assert "generation 1.2 is not noted" in caplog.text
    assert str(tmp_path / "gone" / "w1.spec") in caplog.text


def test_a_generation_that_raises_is_over_for_those_that_follow(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Run):
        def run(self) -> None:
            if self.spec.id == B:
                raise RuntimeError("no such thing")
            super().run()

        def interrupt(self, flag: Any) -> None:
            self.told.append(flag)  # nobody is there to hear it

    monkeypatch.setattr(worker_module, "GenerationRun", Broken)
    with pytest.raises(RuntimeError, match="no such thing"):
        worker.run_generation(2, spec(B), STORE)
    found: list[m.Outcome | None] = []
    later = threading.Thread(
        target=lambda: found.append(worker.run_generation(2, spec(C), STORE)), daemon=True
    )
    later.start()
    later.join(10.0)
    assert found == [m.Outcome("w1", C, "finished", 9)]


def test_a_generation_outlasts_any_number_of_coordinators_that_join_it(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that joins holds a thread of the actor, of which there are 16: the oldest are let go."""
    monkeypatch.setattr(worker_module, "JOIN_S", 0.005)
    worker._run = Run(None, spec(A), STORE)
    found: list[m.Outcome | None] = []

    def join(term: int) -> None:
        found.append(worker.run_generation(term, spec(A), None))

    threads = [threading.Thread(target=join, args=(term,), daemon=True) for term in range(1, 41)]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    until = time.monotonic() + 5.0
    while len(found) < 40 - worker_module.MOST_JOINS and time.monotonic() < until:
        time.sleep(0.01)
    assert found == [None] * (40 - worker_module.MOST_JOINS)
    worker._run.outcome = m.Outcome("w1", A, "finished", 9)
    worker._run.done.set()
    for thread in threads:
        thread.join(5.0)
    assert found[-worker_module.MOST_JOINS :] == [worker._run.outcome] * worker_module.MOST_JOINS


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

    async def unchanged(begin: m.Begin) -> m.Begin:
        return begin

    made: Any = Coordinator.__new__(Coordinator)
    made.told = told
    made.commands = []

    made._loop = SimpleNamespace(call_soon_threadsafe=lambda call, *arguments: call(*arguments))
    made._executor = SimpleNamespace(
        ending=False,
        term=2,
        spawn=lambda work: (work.close(), note("spawn", work.__name__)),
        carry_out=lambda command: note("carry out", command),
        keeper=SimpleNamespace(finish=lambda patience_s: note("keep record", patience_s)),
    )
    made._planner, made._flush_s = SimpleNamespace(close=lambda: None), 0.5
    made._evidence = SimpleNamespace(begin=lambda term, folder: None)
    end = partial(setattr, made._executor, "ending", True)
    made._supervisor = Supervisor(lambda *words: note("note", *words), end)
    made._begun, made._early = True, EarlyEvents()
    made._cluster = SimpleNamespace(
        gone=lambda worker: note("gone", worker),
        heard=lambda node: note("heard", node),
        groups=BeatGroups(1.0),
        note_workers=lambda node, workers: None,
    )
    made._machine = SimpleNamespace(
        handle=lambda event, now: note("event", event) or list(made.commands),
        eventful=True,
        slept_s=0.0,
        memory=SimpleNamespace(spec=None),
    )
    made._record = SimpleNamespace(
        observe=lambda event, commands, at_s, line: None,
        owed=(),
        ended=None,
        failed_s_ago=tuple,
        past=dict,
        deaths=0,
        figures=lambda node, figures: note("figures", node, len(figures)),
        attached=lambda submission: note("attached", submission),
        status=lambda since, most_pages: {"since": since, "done": since > 5},
    )
    made._telemetry = RunTelemetry(None, made._record)
    made._calibrations = SimpleNamespace(observe=lambda memory, event, commands: None, begin=unchanged)
    made._tracking = SimpleNamespace(observe=lambda event, commands: note("tracked", event))
    made._chaos = SimpleNamespace(reached=lambda step: note("reached", step))
    made._last_lines = SimpleNamespace(gone=lambda worker: note("gone", worker))
    made._logs = SimpleNamespace(learn=lambda identity: None, close=lambda: None)
    made._followers = Followers()
    made.logged = []
    made._event_log = SimpleNamespace(
        next_line=1,
        add=lambda now, slept_s, event, commands: made.logged.append(event),
        quiet=lambda now, event: made.logged.append("quiet"),
        close=lambda: None,
    )
    return made


def events(coordinator: Any) -> list[Any]:
    found = [words[1] for words in coordinator.told if words[0] == "event"]
    coordinator.told.clear()
    return found


def test_what_is_heard_becomes_an_event(coordinator: Any) -> None:
    coordinator.request("stop")
    coordinator.sealed("n1", (1, 2), 5, [])
    assert [words[0] for words in coordinator.told] == ["event", "tracked"] * 2
    assert events(coordinator) == [m.UserRequest("stop"), m.SnapshotSealed("n1", B, 5, ())]
    assert len(coordinator.logged) == 2
    coordinator.worker_exited("w1", "process gone")
    assert coordinator.told[0] == ("gone", "w1")
    assert events(coordinator) == [m.WorkerExited("w1", "process gone")]


def test_a_stall_is_handled_once_it_is_known_where_all_ranks_are(coordinator: Any) -> None:
    asked: list[Any] = []

    async def before(*words: Any) -> None:
        asked.append(words)
        raise RuntimeError("no room for stacks")

    coordinator._evidence = Evidence.__new__(Evidence)
    coordinator._evidence.before = before

    def run(work: Any) -> None:
        with contextlib.suppress(RuntimeError):  # told by its spawner; the stall is handled all the same
            asyncio.run(work)

    coordinator._executor.spawn = run
    for spec in (None, SimpleNamespace(id=B, members=("w0", "w1"))):
        coordinator._machine.memory = SimpleNamespace(spec=spec)
        coordinator.stalled("w1", [1, 2], "reduce", 1.5)
        assert events(coordinator) == [m.Stalled("w1", B, "reduce", 1.5)]
    assert asked == [(B, 2, "worker w1 in phase reduce for 1.5 s")]


def test_nothing_is_handled_at_the_end(coordinator: Any) -> None:
    coordinator._executor.ending = True
    coordinator.request("stop")
    assert coordinator.told == []
    coordinator._executor.ending, coordinator._tracking = False, None
    coordinator.request("stop")
    assert coordinator.told == [("event", m.UserRequest("stop"))]


def test_commands_are_carried_out_and_the_end_begins(coordinator: Any) -> None:
    stop = m.StopWorker("w1")
    coordinator.commands = [stop, m.Finish("finished", ""), stop]
    coordinator.request("stop")
    assert coordinator.told[2:] == [("carry out", stop), ("spawn", "or_exit"), ("carry out", stop)]


def test_a_heartbeat_tells_the_steps_of_the_newest_generation(coordinator: Any) -> None:
    of_tools = {"phase": "hold", "debugged": 0}
    pages = [
        {"term": 1, "n": 2, "worker": "a", "step": 7, **of_tools, "debugged": 1},
        {"term": 1, "n": 2, "worker": "b", "step": 8, **of_tools},
        {"term": 1, "n": 1, "worker": "old", "step": 9},
        {"term": 0, "n": 0, "worker": "idle", "step": 0},
    ]
    assert coordinator.heartbeats("n1", {"n1": pages}) == "", "few nodes call by themselves"
    beat = m.Heartbeat("n1", B, {"a": 7, "b": 8}, ("old", "idle"), held=True, debugged=("a",))
    assert coordinator.told == [
        ("heard", "n1"),
        ("figures", "n1", 4),
        ("event", beat),
        ("tracked", beat),
        ("reached", 8),
    ]
    coordinator.told.clear()
    coordinator.heartbeats("n1", {"n1": pages[3:]})
    assert coordinator.told[2:] == [
        ("event", m.Heartbeat("n1", None, {}, ("idle",))),
        ("tracked", m.Heartbeat("n1", None, {}, ("idle",))),
        ("reached", 0),
    ]  # fmt: skip


def test_a_heartbeat_names_workers_without_a_page_and_those_that_are_rescued(coordinator: Any) -> None:
    page = {"term": 1, "n": 2, "worker": "a", "step": 7, "phase": "data", "debugged": 0}
    figures = [
        {**page, "rescued": True},
        {"worker": "b", "rescued": True},
        {"worker": "c"},
    ]
    coordinator.heartbeats("n1", {"n1": figures})
    beat = m.Heartbeat("n1", B, {"a": 7}, ("b", "c"), ("a", "b"))
    assert coordinator.told[1:3] == [("figures", "n1", 1), ("event", beat)]
    _, pages, _ = read_heartbeat("n1", figures)
    assert pages == [page]


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
    identity, data, overtaken_by = "this run", "aa", "far:5"

    def __init__(self, told: list[Any]) -> None:
        self.told, self.term, self.error = told, 2, None
        self.news, self.complaints, self.unusable = ["started from x"], ["slow"], ""

    def claim(self) -> int:
        if self.error is not None:
            raise self.error
        return self.term

    def state(self, read_generations: bool) -> Any:
        self.told.append(("state", read_generations))
        return (m.Commit(5, A, "five", 1),), (spec(A),)

    executor = None
    newest: bool | None = True
    last_generation = None

    def newest_record(self, readable: Any) -> bytes | None:
        return None

    def is_newest(self) -> bool | None:
        return self.newest

    def close(self, ended: str = "") -> None:
        """It has no process."""

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
    coordinator._begun = False
    for name, answer in {"summary": {"status": "s"}, "recall": None, "done": None}.items():
        setattr(coordinator._record, name, note(name, answer))
    coordinator._record.begin = lambda term, figures, newest: note("begin")(term, figures)
    coordinator._record.note = note("note")
    coordinator._record.memo = lambda: {"term": 2, "line": 0}
    coordinator._cluster.activity = note_async("activity", "none")
    coordinator._cluster.hello = note_async("hello", coordinator.agents)
    coordinator._cluster.close = note_async("close", {})
    coordinator._cluster.heard = 0

    async def heard_term(patient: bool = True) -> int:
        return int(coordinator._cluster.heard)

    coordinator._cluster.heard_term = heard_term
    coordinator._cluster.figures = note_async("ask figures", {"n1": [1, 2]})
    coordinator._cluster.adopt_workers = note("adopt")
    coordinator._cluster.traits = ()
    coordinator._cluster.keeping = note_async("keeping", {})
    tracking = SimpleNamespace(observe=lambda event, _: note("tracked")(event), finish=note_async("track"))
    monkeypatch.setattr(actor_module, "Tracking", lambda *_: tracking)
    monkeypatch.setattr(closing, "LINGER_S", 0.0)
    monkeypatch.setattr(closing.local_ray, "announce_end", note("announce end"))
    monkeypatch.setattr(closing.kept_slots, "discard", note("discard"))
    monkeypatch.setattr(closing.ray, "get_actor", lambda name, namespace: (name, namespace))
    coordinator.living = True

    async def is_living(name: str) -> bool:
        return coordinator.living

    monkeypatch.setattr(closing, "is_this_process", is_living)

    async def is_newest() -> bool | None:
        return coordinator._store.is_newest()

    coordinator._executor.is_newest = is_newest
    monkeypatch.setattr(closing.ray, "kill", note("kill"))
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
        ("hello", 1, whole._record.note, None),
        ("state", True),
        ("recall", None, [], ""),
        ("begin", 1, "figures of commits"),
        ("note", "info", "launch", "hint"),
        ("note", "info", "init-from", "started from x"),
        ("note", "warning", "storage", "slow"),
        ("keeping", (spec(A),)),
        ("adopt", ()),
        ("event", begun),
        ("tracked", begun),
        ("spawn", "keep"),
        ("spawn", "_watch_nodes"),
        ("spawn", "keep"),
        ("spawn", "keep"),
    ]
    whole._event_log.close()
    assert sorted(path.name for path in folder.iterdir()) == ["events-1.jsonl", "notes.txt", "record.json"]
    whole._event_log.close()
    head, line = (
        json.loads(unseal(line) or "") for line in (folder / "events-1.jsonl").read_text().splitlines()
    )
    assert head["planner"] == {"device": "cpu", "answers": "events", "flush_s": 0.5}
    assert line["event"]["type"] == "Begin"


def test_a_later_coordinator_adopts_what_runs(whole: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "events"
    folder.mkdir(parents=True)
    (folder / "events-1.jsonl").write_text('{}\n{"old": 1}\n')
    whole._job = job(metrics__enabled=False)
    whole.agents.update(
        n1={"spec": spec(A), "workers": ["w1", "w2"], "busy": [("w1", 1, 2)], "step_s": 3.5},
        n2={"spec": spec(B), "workers": ["w3", "w4"], "busy": []},
        n3={"spec": None, "workers": [], "busy": []},
    )
    for each in whole.agents.values():
        each["data"] = dict.fromkeys(each["workers"], "aa") | {"w4": "bb"}
    told = begin(whole)
    workers = (m.Member("w1", "n1"), m.Member("w2", "n1"), m.Member("w3", "n2"))
    begun = m.Begin(2, (m.Commit(5, A, "five", 1),), (spec(A),), spec(B), workers, (m.BusyWorker("w1", B),))
    begun = replace(begun, step_s=3.5)
    assert ("state", False) in told, "the agents know the generations"
    assert ("recall", None, [LoggedLine(1, {}, {"old": 1})], "") in told
    assert ("adopt", workers) in told
    assert ("event", begun) in told
    assert told.count(("spawn", "keep")) == 2, "no metrics were asked for"
    whole._event_log.close()
    assert {path.name for path in folder.iterdir()} == {"events-1.jsonl", "events-2.jsonl", "record.json"}


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
    if coordinator.told:
        assert coordinator.told[:2] == [("ask figures",), ("figures", "n1", 2)]
    return [words for words in coordinator.told[2:] if words != ("summary", finish)]


def test_an_end_closes_all_and_is_kept(whole: Any, tmp_path: Path) -> None:
    begin(whole)
    file = tmp_path / "run" / "prometheus_targets.json"
    file.write_text("[]")
    finish = m.Finish("finished", "why")
    assert end(whole, "finished") == [
        ("close", 2, None, True), ("keep record", 3600.0), ("track", "s"),
        ("done", finish, {"status": "s", "kept": True}),
        ("discard", run_folders(whole._job)), ("announce end",)
    ]  # fmt: skip
    assert not file.exists()
    whole._options["owns_ray"] = False
    whole._tracking = None
    assert end(whole, "finished") == [
        ("close", 2, None, True),
        ("keep record", 3600.0),
        ("done", finish, {"status": "s", "kept": True}),
        ("kill", (coordinator_name(whole._job.name), NAMESPACE)),
    ]


@pytest.mark.parametrize("status", ["storage", "fenced"])
def test_an_end_without_storage_leaves_the_record_to_others(whole: Any, tmp_path: Path, status: Any) -> None:
    begin(whole)
    file = tmp_path / "run" / "prometheus_targets.json"
    file.write_text("[]")
    done = ("done", m.Finish(status, "why"), {"status": "s"})
    assert end(whole, status) == [("close", 2, None, False), done, ("announce end",)]
    assert file.exists()


def test_an_end_says_which_node_could_not_mark_what_it_was_to_keep(whole: Any) -> None:
    async def close(*words: Any) -> dict[str, str]:
        return {"a": "full"}

    begin(whole)
    whole._cluster.close = close
    asyncio.run(
        whole._end(m.Finish("storage", "why; its snapshots are kept, launch", m.Source("slots", 7, A)))
    )
    (done,) = [words[1] for words in whole.told if words[0] == "done"]
    assert done.detail == "why; its snapshots are not all marked as kept (node a: full), launch"


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
        ("keep record", 3600.0), ("track", "s"),
        ("done", m.Finish("failed", "why"), {"status": "s"}), ("announce end",)
    ]  # fmt: skip


def test_an_orphan_is_stopped_until_it_is_done_whatever_fails_in_between(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(whole)
    whole.told.clear()
    answers: list[Any] = [False, RuntimeError("the head is away"), False, True]
    going = iter([True] * 6 + [False])

    def is_gone(process: dict[str, int]) -> bool:
        assert process == {"pid": 7}
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(owner_watch.owner_process, "is_gone", is_gone)
    watch = owner_watch.OwnerWatch({"pid": 7}, whole._record, whole._dispatch)
    asyncio.run(whole._supervisor.keep("the watch of the owner", watch.look, lambda: next(going), 0.0))
    assert answers == []
    notes = [words[1:3] for words in whole.told if words[0] == "note"]
    assert notes == [("error", "internal"), ("warning", "orphaned")]
    assert events(whole) == [m.UserRequest("stop")] * 3, "told until it is done"


def test_time_and_nodes_become_events_until_the_end(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(whole)
    room: list[Any] = []
    request = SimpleNamespace(
        update=lambda missing, needs, now: room.append((missing, needs)), clear=lambda: room.append("clear")
    )
    rounds = [0]

    def count(limit: int) -> None:
        rounds[0] += 1
        whole._executor.ending = rounds[0] == limit

    async def changes(term: int) -> list[m.Event]:
        count(2)
        return [m.NodeLost(f"n{term}{rounds[0]}", "gone")]

    whole._cluster.changes, whole._cluster.needs = changes, "needs"
    whole._machine.view = SimpleNamespace(missing=3)

    def going() -> bool:
        return not whole._executor.ending

    monkeypatch.setattr(actor_module, "NODE_POLL_S", 0.0)
    monkeypatch.setattr(actor_module, "RoomRequest", lambda: request)
    for autoscale, asked in ((True, [(3, "needs"), (3, "needs"), "clear"]), (False, ["clear"])):
        whole._job = job(cluster__autoscale=autoscale)
        whole._executor.ending, rounds[0] = False, 0
        whole.told.clear()
        room.clear()
        asyncio.run(whole._watch_nodes(going))
        assert events(whole) == [m.NodeLost("n21", "gone")], "the second round comes too late to be handled"
        assert room == asked
    whole._executor.ending, rounds[0] = False, 0
    whole._machine.handle = lambda event, now: whole.told.append(("event", event)) or count(3) or []
    asyncio.run(whole._supervisor.keep("ticks", whole._tick, going, 0.0))
    assert events(whole) == [m.Tick()] * 3


# --- fenced and failing ------------------------------------------------------------------------------


def test_a_stale_coordinator_touches_nothing_of_its_successors_run(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(whole)
    whole.living = False
    whole._store.newest = False
    gone: list[int] = []

    def leave(code: int) -> None:
        gone.append(code)
        raise SystemExit

    monkeypatch.setattr(closing.os, "_exit", leave)
    for finish in (m.Finish("failed", "lost all its workers"), m.Finish("fenced", "refused")):
        whole.told.clear()
        with pytest.raises(SystemExit):
            asyncio.run(whole._end(finish))
        assert whole.told == []
    assert gone == [0, 0]


def test_a_run_that_another_cluster_took_over_goes_without_a_summary(whole: Any) -> None:
    begin(whole)
    whole._store.newest = False
    asyncio.run(whole._end(m.Finish("finished", "all steps")))
    assert [words[1].status for words in whole.told if words[0] == "done"] == ["fenced"]
    assert not [told for told in whole.told if told[0] == "track"]


def test_an_end_that_an_agent_refuses_is_another_coordinators(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(whole)
    gone: list[int] = []

    def leave(code: int) -> None:
        gone.append(code)
        raise SystemExit

    monkeypatch.setattr(closing.os, "_exit", leave)
    whole._cluster.heard, whole.living = 3, False
    whole.told.clear()
    with pytest.raises(SystemExit):
        asyncio.run(whole._end(m.Finish("finished", "all steps")))
    assert (gone, [words[0] for words in whole.told]) == ([0], ["ask figures", "figures"])


@pytest.mark.parametrize("late", [False, True], ids=["agent asked", "agent refuses"])
def test_a_fence_that_agents_tell_of_keeps_all_slots_where_nobody_here_took_over(
    whole: Any, late: bool
) -> None:
    """The name and storage are used elsewhere; storage did not answer who has the newest term."""
    begin(whole)
    whole.told.clear()
    closed: list[Any] = []

    async def close(term: int, *words: Any) -> dict[str, str]:
        closed.append((term, *words))
        if term < 3:
            whole._cluster.heard = 3
            raise FencedError("refused: term 2 is older than 3")
        return {}

    whole._cluster.close, whole._cluster.heard = close, 0 if late else 3
    asyncio.run(whole._end(m.Finish("finished", "all steps")))
    assert closed == [(2, None, True)] * late + [(3, m.Source("slots"), False)]
    (done,) = (words[1] for words in whole.told if words[0] == "done")
    assert (done.status, done.keep) == ("fenced", m.Source("slots"))
    assert re.search("term 2 is older than 3.*its snapshots are kept", done.detail)
    assert not [words for words in whole.told if words[0] == "discard"]


def test_what_comes_before_the_begin_is_handled_after_it(whole: Any) -> None:
    heartbeats = [m.Heartbeat("n1", B, {"w1": step}) for step in (1, 2)]
    early = [m.UserRequest("stop"), heartbeats[0], m.WorkerExited("w1", "gone"), m.UserRequest("stop")]
    for event in (*early, m.Tick(), heartbeats[1]):
        whole._dispatch(event)
    assert events(whole) == []
    begin(whole)
    first, *others = events(whole)
    assert isinstance(first, m.Begin)
    assert others == [m.UserRequest("stop"), heartbeats[1], m.WorkerExited("w1", "gone")]


def test_a_begin_that_an_agent_refuses_is_fenced_at_once(whole: Any) -> None:
    ended: list[m.Finish] = []

    async def hello(term: int, tell: Any, newest: Any) -> Any:
        raise FencedError("refused: term 2 is older than 3")

    async def end(finish: m.Finish) -> None:
        ended.append(finish)

    whole._cluster.hello, whole._end = hello, end
    begin(whole)
    assert ended == [m.Finish("fenced", "refused: term 2 is older than 3", m.Source("slots"))], "slots stay"


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(supervision.os, "_exit", codes.append)
    monkeypatch.setattr(supervision, "EXIT_PAUSE_S", 0.0)
    monkeypatch.setattr(supervision, "threading", SimpleNamespace(Thread=AtOnce))
    return codes


class AtOnce:
    """A thread whose work is done when it has been started."""

    def __init__(self, target: Any, args: Any, **how: Any) -> None:
        self.start = lambda: target(*args)


def test_an_error_of_the_machine_ends_the_process(coordinator: Any, exits: list[int]) -> None:
    def handle(event: m.Event, now: float) -> Any:
        raise AssertionError("no transition")

    coordinator._machine.handle = handle
    coordinator.request("stop")
    assert exits == [supervision.EXIT_CODE]
    note = ("note", "error", "internal", "coordinator: the machine: AssertionError('no transition')")
    assert coordinator.told == [note]


def test_a_begin_that_fails_ends_the_process(coordinator: Any, exits: list[int]) -> None:
    async def begin() -> None:
        raise KeyError("spec")

    asyncio.run(coordinator._supervisor.or_exit("the begin", begin))
    assert exits == [supervision.EXIT_CODE]


def test_exits_one_after_the_other_come_ever_more_seldom(tmp_path: Path) -> None:
    """Each term that begins is claimed in the log: one that fails at once may not claim thousands."""
    folder, now, found = tmp_path / "run" / "events", 1000.0, []
    for _ in range(9):
        found.append(supervision.exit_pause_s(folder, now))
        now += found[-1] + 5.0
    assert found == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0, 120.0]
    assert supervision.exit_pause_s(folder, now + supervision.FRESH_S + 1.0) == 2.0, "it has run since"
    assert supervision.exit_pause_s(folder, 0.0) == 2.0, "the clock was set back"
    (folder / supervision.EXITS).write_text("torn")
    assert supervision.exit_pause_s(folder, now) == 2.0
    assert supervision.exit_pause_s(None, now) == 2.0
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert supervision.exit_pause_s(blocked / "events", now) == 2.0


def test_an_exit_waits_as_long_as_those_before_it_ask_for(
    coordinator: Any, exits: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(time=lambda: 50.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(supervision, "time", clock)
    monkeypatch.setattr(supervision, "EXIT_PAUSE_S", 3.0)
    for _ in range(2):
        supervisor = supervision.Supervisor(lambda *words: None)
        supervisor.folder = tmp_path
        for _ in range(2):
            supervisor.exit("the machine", AssertionError("x"))
    assert (slept, exits) == ([3.0, 6.0], [supervision.EXIT_CODE] * 2), "each process exits once"


def test_the_loop_goes_on_before_an_exit_and_decides_nothing(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause of up to two minutes is not the loop's: calls to it would pile up, and answers be held."""
    left = threading.Event()
    monkeypatch.setattr(supervision.os, "_exit", lambda code: left.set())
    monkeypatch.setattr(supervision, "exit_pause_s", lambda folder, now_s: 0.5)
    handled: list[m.Event] = []

    def handle(event: m.Event, now: float) -> Any:
        handled.append(event)
        raise AssertionError("no transition")

    coordinator._machine.handle = handle
    for _ in range(3):
        coordinator.request("stop")
    assert (left.is_set(), len(handled)) == (False, 1), "that was at once"
    assert left.wait(5.0)


def test_a_begin_that_fails_is_tried_again_under_the_same_term(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    tries, claims = [0], [0]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def hello(term: int, tell: Any, newest: Any) -> Any:
        tries[0] += 1
        if tries[0] < 4:
            raise KeyError("spec")
        return {}

    claim = whole._store.claim

    def counted() -> int:
        claims[0] += 1
        return int(claim())

    monkeypatch.setattr(supervision, "asyncio", SimpleNamespace(sleep=sleep))
    whole._executor.term = 0
    whole._cluster.hello, whole._store.claim = hello, counted
    begin(whole)
    assert (tries, claims, slept) == ([4], [1], [1.0, 2.0, 4.0])
    assert [type(event) for event in events(whole)] == [m.Begin]


def test_no_command_waits_for_what_only_follows(coordinator: Any) -> None:
    """A full disk, a record or a tracker that fails: the machine's commands are obeyed all the same."""

    def fail(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    coordinator._event_log.add = coordinator._record.observe = coordinator._tracking.observe = fail
    command = m.StopWorker("w1")
    coordinator.commands = [command]
    coordinator.request("stop")
    coordinator.request("checkpoint")
    assert coordinator.told.count(("carry out", command)) == 2
    assert len([words for words in coordinator.told if words[0] == "note"]) == 6


def test_a_loop_outlives_its_errors_and_tells_them_ever_more_seldom() -> None:
    told: list[str] = []
    rounds = [0]

    async def work() -> None:
        rounds[0] += 1
        raise ValueError(rounds[0])

    supervisor = Supervisor(lambda level, kind, text: told.append(text))
    asyncio.run(supervisor.keep("nodes", work, lambda: rounds[0] < 9, 0.0))
    assert supervisor.counts["nodes"] == 9
    assert told == [
        "coordinator: nodes: ValueError(1)",
        *(f"coordinator: nodes: ValueError({n}) ({n} times by now)" for n in (2, 4, 8)),
    ]


def test_what_the_launch_was_asked_before_a_restart_is_asked_of_the_machine_again(whole: Any) -> None:
    whole._record.owed = (m.UserRequest("checkpoint"), m.UserRequest("stop"))
    begin(whole)
    begun, *asked = events(whole)
    assert (type(begun), asked) == (m.Begin, list(whole._record.owed))


def test_a_log_that_cannot_be_read_keeps_no_term_from_beginning(whole: Any) -> None:
    def recall(*words: Any) -> None:
        raise KeyError("facts")

    whole._record.recall = recall
    told = begin(whole)
    assert ("note", "error", "internal", "coordinator: what earlier terms knew: KeyError('facts')") in told
    assert [type(event) for event in events(whole)] == [m.Begin]


def test_signs_of_life_that_nothing_follows_from_get_no_line(coordinator: Any) -> None:
    coordinator._machine.eventful = False
    coordinator._dispatch(m.Tick())
    assert coordinator.logged == ["quiet"]
