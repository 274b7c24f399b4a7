"""Agent, executor of commands, cluster and worker on their own, beside fakes that note what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from picotron_ray.checkpoint.shard_service.client import RemoteSlot, ShardClient
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import PIN_AT, SlotHeader, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_reader import READING, is_pinned
from picotron_ray.checkpoint.snapshot.slot_sweep import owner
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.intents import Intents
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.lineage import slim
from picotron_ray.coordinator.out_of_memory import STRUCK
from picotron_ray.errors import (
    CorruptError,
    FencedError,
    PicotronError,
    SlotError,
    SlotReusedError,
    SlotUnreachableError,
    StorageFullError,
    UnmarkedError,
)
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.observability.nvml import Card
from picotron_ray.runtime.coordinator import cluster as cluster_module
from picotron_ray.runtime.coordinator import command_executor, greetings, room_request, worker_orders
from picotron_ray.runtime.coordinator.admission import joined, objection, traits_of
from picotron_ray.runtime.coordinator.records import sign_of
from picotron_ray.runtime.coordinator.room_request import PATIENCE_S, RoomRequest
from picotron_ray.runtime.heartbeat import Page, process_start_ticks
from picotron_ray.runtime.node_agent import agent as agent_module
from picotron_ray.runtime.node_agent import stall_watch, uploads
from picotron_ray.runtime.node_agent.agent import Agent
from picotron_ray.runtime.node_agent.burial import Burials, bury
from picotron_ray.runtime.node_agent.folder_guard import PUT_OFF, FolderGuard
from picotron_ray.runtime.node_agent.rendezvous import RendezvousServer
from picotron_ray.runtime.node_agent.reports import AGAIN_S, Reports
from picotron_ray.runtime.node_agent.uploads import Ended
from picotron_ray.runtime.ray_cluster import kept_slots, ray_calls
from picotron_ray.runtime.ray_cluster.data_notes import leave_note
from picotron_ray.runtime.ray_cluster.host_memory import PROCESS_BYTES
from picotron_ray.runtime.ray_cluster.names import agent_name, worker_actor_name
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds, worker_needs
from picotron_ray.runtime.run_storage import shared_folder
from tests.support.runs.coordinator_parts import Bench, Nodes, Told, view
from tests.support.runs.coordinator_world import job

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
    heard: Future[None] = Future()
    heard.set_result(None)
    monkeypatch.setattr(Agent, "_tell", lambda self, *words: told.append(words) or heard)
    config = job(metrics__enabled=False, elastic__hang_floor_s=1.0, snapshot__folder=str(tmp_path))
    return Agent(config.model_dump(mode="json"), "n1", "127.0.0.1")


def test_an_agents_next_process_knows_its_term_and_says_that_it_is_back(
    agent: Agent, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(get_actor_id=lambda: "actor")
    monkeypatch.setattr(agent_module.ray, "get_runtime_context", lambda: runtime)
    config = agent._job.model_dump(mode="json")
    first = Agent(config, "n1", "127.0.0.1")
    first._accept(4)
    first._look(1.0, heartbeat=False)
    assert told == []
    second = Agent(config, "n1", "127.0.0.1")
    with pytest.raises(PicotronError, match="term 3 is older than 4"):
        second._accept(3)
    second._look(1.0, heartbeat=False)
    second._look(2.0, heartbeat=False)
    assert told == [("agent_restarted", "n1", {})]
    runtime.get_actor_id = lambda: "another"
    Agent(config, "n1", "127.0.0.1")._accept(1)  # of a run that starts its terms anew


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


def test_an_agent_tells_what_data_its_living_workers_see(agent: Agent) -> None:
    page_of(agent, "w1")
    for worker in ("w1", "dead"):
        leave_note(agent._folder, worker, "aa")
    page_of(agent, "early")
    assert agent.hello(1)["data"] == {"w1": "aa"}


def test_an_agent_passes_an_order_on_to_the_workers_that_are_there(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Told = []

    def find(name: str, namespace: str) -> Any:
        if "ended" in name:
            raise ValueError(name)
        return SimpleNamespace(interrupt=SimpleNamespace(remote=lambda *words: seen.append((name, *words))))

    monkeypatch.setattr(agent_module.ray, "get_actor", find)
    agent.order(2, ["w1", "ended", "w2"], "interrupt", [(1, 1), "hard"])
    with pytest.raises(PicotronError, match="term 1 is older than 2"):
        agent.order(1, ["w1"], "interrupt", [(1, 1), "hard"])
    names = [worker_actor_name(agent._job.name, worker) for worker in ("w1", "w2")]
    assert seen == [(name, 2, (1, 1), "hard") for name in names]


def test_an_agent_obeys_the_newest_term_alone(agent: Agent) -> None:
    agent.quarantine(2, "x", (1, 1, 5))
    agent.quarantine(2, "y", (1, 1, 5))
    for call in (
        lambda: agent.quarantine(1, "z", (1, 1, 5)), lambda: agent.inventory(1), lambda: agent.kill(1, "w"),
        lambda: agent.release(1, (1, 1), 3), lambda: agent.upload(1, (1, 1), 3, ()),
    ):  # fmt: skip
        with pytest.raises(PicotronError, match="term 1 is older than 2"):
            call()
    assert agent._quarantined == {"x": (1, 1, 5), "y": (1, 1, 5)}


def test_an_inventory_reads_headers_alone_and_leaves_out_what_was_set_aside(agent: Agent) -> None:
    """Recovery waits for it, and digests of a node's slots can take longer than that."""
    good, aside, damaged = (slot_of(agent, f"w{n}", 5) for n in range(3))
    damaged.write_bytes(damaged.read_bytes().replace(BODY, BODY[::-1]))
    agent.quarantine(1, aside.name, (1, 1, 5))
    wanted = m.SlotInfo("n1", good.name, A, 5, 0, (m.Fragment(0, 0, 1),))
    assert agent.inventory(1) == (wanted, replace(wanted, slot=damaged.name))
    peer = ShardClient(agent.shard_service, timeout_s=5.0)
    with closing(peer):
        assert RemoteSlot(peer, f"../{good.name}", (1, 1, 5)).header.rank == 0, "of its own folder alone"
        for name in (aside.name, "none.0.slot"):
            with pytest.raises(SlotUnreachableError, match=name):
                RemoteSlot(peer, name, (1, 1, 5))


def test_a_later_state_in_a_file_that_was_set_aside_is_offered(agent: Agent) -> None:
    path = slot_of(agent, "w1", 5)
    agent.quarantine(1, path.name, (1, 1, 5))
    assert agent.inventory(1) == ()
    slot_of(agent, "w1", 8)
    assert [info.step for info in agent.inventory(1)] == [8]


def upload_of(agent: Agent, step: int, slot: str) -> Ended:
    """Ask for an upload, and await its end."""
    agent.upload(1, (1, 1), step, (slot,))
    (end,) = await_ends(agent, 1)
    return end


def await_ends(agent: Agent, count: int) -> list[Ended]:
    found: list[Ended] = []
    until = time.monotonic() + 10
    while len(found) < count and time.monotonic() < until:
        found += agent._uploads.ended()
        time.sleep(0.001)
    return found


def test_a_late_upload_of_a_slot_that_was_given_up_is_no_corruption(agent: Agent) -> None:
    storage = LocalStorage(agent._folder / "storage", "run")
    agent._uploads._opened = storage, Intents(storage)
    path = slot_of(agent, "w1", 8)
    assert upload_of(agent, 5, path.name).error == f"gone:{path.name}"
    assert upload_of(agent, 5, "none.0.slot").error == "gone:none.0.slot"
    path.write_bytes(path.read_bytes().replace(BODY, BODY[::-1]))
    assert upload_of(agent, 8, path.name).error == f"corrupt:{path.name}"


def test_no_call_waits_for_an_upload_and_one_that_is_asked_for_again_is_joined(
    agent: Agent, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage may hang for hours: each call that waited would hold one of the agent's threads."""
    may_end, calls = threading.Event(), []

    def upload(generation: tuple[int, int], step: int, slots: tuple[str, ...]) -> bytes:
        calls.append(step)
        assert may_end.wait(10)
        return str(step).encode()

    monkeypatch.setattr(agent._uploads, "run", upload)
    for step in (5, 5, 6):
        agent.upload(1, (1, 1), step, ("s",))
    while len(calls) < 2:
        time.sleep(0.001)
    agent._look(1.0, heartbeat=False)
    assert told == [], "neither has ended"
    may_end.set()
    assert sorted(end.step for end in await_ends(agent, 2)) == [5, 6]
    assert sorted(calls) == [5, 6]
    agent.upload(1, (1, 1), 5, ("s",))
    (end,) = await_ends(agent, 1)
    assert end == Ended((1, 1), 5, ("s",), b"5")
    assert sorted(calls) == [5, 5, 6], "nothing is remembered"


@pytest.mark.parametrize(
    ("error", "text", "full"),
    [
        (CorruptError("torn", "s.slot"), "corrupt:s.slot", False),
        (SlotReusedError("x", "s"), "gone:s", False),
        (StorageFullError("no room"), "no room", True),
        (OSError("a\nb"), "b", False),
    ],
)
def test_an_uploads_end_is_told_until_it_is_acknowledged(
    agent: Agent, told: Told, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str, full: bool
) -> None:
    def upload(*what: Any) -> bytes:
        raise error

    def away(*words: Any) -> Future[None]:
        told.append(words)
        raise ValueError("no coordinator")

    monkeypatch.setattr(agent._uploads, "run", upload)
    hearing = agent._reports._send
    agent._reports._send = away
    agent.upload(1, (1, 1), 5, ("s.slot",))
    until = time.monotonic() + 10
    while not told and time.monotonic() < until:
        agent._look(1.0, heartbeat=False)
    agent._reports._send = hearing
    told.clear()
    for at in (2.0, 3.0, 4.0):
        agent._look(at, heartbeat=False)
    assert told == [("uploaded", "n1", Ended((1, 1), 5, ("s.slot",), None, text, full))]


def test_ends_of_several_uploads_of_a_step_are_all_told(agent: Agent, told: Told) -> None:
    """One that is not acknowledged must not give way to another's."""

    def away(*words: Any) -> Future[None]:
        raise ValueError("no coordinator")

    storage = LocalStorage(agent._folder / "storage", "run")
    agent._uploads._opened = storage, Intents(storage)
    hearing, agent._reports._send = agent._reports._send, away
    asked = (((1, 1), 5, ("s",)), ((1, 1), 5, ("s", "t")), ((1, 2), 5, ("s",)), ((1, 1), 6, ("s",)))
    for generation, step, slots in asked:
        agent.upload(1, generation, step, slots)
    ends = await_ends(agent, 4)
    for end in ends:
        agent._uploads._ended.put(end)
    agent._look(1.0, heartbeat=False)
    agent._reports._send = hearing
    agent._look(1.0 + AGAIN_S, heartbeat=False)
    assert {words[2].key for words in told} == set(asked)


def test_a_failed_upload_leaves_slots_alone_that_another_reads(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer would give them up for a newer checkpoint, in the midst of the other's reading."""
    shared, own = slot_of(agent, "w1", 5), slot_of(agent, "w2", 5)
    agent._uploads._opened = (storage := LocalStorage(agent._folder / "storage", "run")), Intents(storage)
    reads, may_end = threading.Event(), threading.Event()

    def upload(paths: list[Path], *rest: Any, **options: Any) -> Any:
        if len(paths) == 1:
            reads.set()
            may_end.wait(10)
        raise StorageFullError("no room")

    def reading() -> list[bool]:
        return [path.read_bytes()[PIN_AT] == READING for path in (shared, own)]

    monkeypatch.setattr(uploads, "upload_slots", upload)
    agent.upload(1, (1, 1), 5, (shared.name,))
    assert reads.wait(10)
    agent.upload(1, (1, 1), 4, (own.name,))  # of a state that this file does not hold any more
    agent.upload(1, (1, 1), 5, (shared.name, own.name))
    await_ends(agent, 1)
    assert reading() == [True, False]
    may_end.set()
    await_ends(agent, 2)
    assert reading() == [False, False]


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


def test_what_the_newest_generation_came_from_stays_until_a_state_of_its_own(agent: Agent) -> None:
    """It may be started again from there: the dead worker's share of it is nowhere else."""
    page_of(agent, "w1")
    dead = slot_of(agent, "gone", 4)
    info = m.SlotInfo("n1", dead.name, A, 4, 0, (m.Fragment(0, 0, 1),))
    source = m.Source("slots", 4, A, (info,), layout=Layout())
    spec = m.GenerationSpec(m.GenerationId(1, 3), (m.Member("w1", "n1"),), Layout(), source, "test")
    (agent._folder / "w1.spec").write_text(json.dumps(plain(spec)))
    agent.release(1, (1, 2), 9)  # a void state of a generation in between
    assert (dead.exists(), is_pinned(dead)) == (True, False)
    agent.release(1, (1, 3), 5)
    assert not dead.exists()


def test_the_release_of_a_void_state_spares_an_older_one_that_waits_for_its_next_upload(
    agent: Agent,
) -> None:
    page_of(agent, "w1")
    mine, dead = slot_of(agent, "w1", 5), slot_of(agent, "gone", 5)
    void, idle = slot_of(agent, "w1", 8, index=1), slot_of(agent, "w1", 4, index=2)
    intents = Intents(storage := LocalStorage(agent._folder / "storage", "run"))
    agent._uploads._opened = storage, intents
    for step in (4, 5, 8):
        intents.put(f"intents/{step}", (1, 1, step), ())
    agent.release(1, (1, 1), 8, keep=((1, 1, 5),))
    assert [is_pinned(path) for path in (mine, dead, void, idle)] == [True, True, False, False]
    assert list(intents._live) == ["intents/5"], "collection would take what other nodes have yet to complete"
    agent.release(1, (1, 2), 9)
    assert list(intents._live) == []
    assert (is_pinned(mine), dead.exists()) == (False, False)


def test_marked_slots_are_told_until_they_are_committed(agent: Agent) -> None:
    (agent._folder / "w1.spec").write_text(json.dumps(plain(SPEC_OF_B)))
    slot_of(agent, "w1", 6, n=2)
    kept, older = slot_of(agent, "gone", 7, n=2), slot_of(agent, "gone", 6, n=2, index=1)
    agent.keep(1, (1, 2, 7))
    info = m.SlotInfo("n1", kept.name, B, 7, 0, (m.Fragment(0, 0, 1),))
    said = agent._kept.told("")
    assert (said["kept"], said["kept_by"]) == ((info,), SPEC_OF_B)
    with pytest.raises(PicotronError, match="older than 1"):
        agent.keep(0, (1, 2, 7))
    agent.release(1, (1, 2), 6, committed=6)
    assert agent._kept.told("")["kept"] == (info,)
    assert older.exists()
    agent.release(1, (1, 3), 9, committed=6)  # a void state of a later generation
    assert agent._kept.told("")["kept"] == (info,)
    agent.release(1, (1, 2), 7, committed=7)
    assert agent._kept.told("")["kept"] == ()
    assert not kept.exists(), "committed: its room is for others"


def test_an_agent_tells_a_new_term_how_long_the_steps_of_its_workers_take(agent: Agent) -> None:
    assert agent.hello(1)["step_s"] == 0.0
    for worker, step_s in {"w1": 3.0, "w2": 4.0, "idle": 9.0}.items():
        page = page_of(agent, worker)
        page.count_step(step_s)
        page.phase("idle" if worker == "idle" else "forward")
    assert agent.hello(1)["step_s"] == 4.0


def test_what_another_run_of_the_name_kept_is_neither_told_nor_deleted(agent: Agent) -> None:
    path = slot_of(agent, "old", 7)
    kept_slots.mark(agent._folder, {path.name: 7}, None, "another run")
    assert agent.hello(1, "")["kept"][0].step == 7, "its coordinator does not know whose it is"
    agent._sees = "this run"
    said = agent.hello(1, "this run")
    assert (said["kept"], said["foreign"]) == ((), 7)
    why = objection(agent._job, said, said["versions"], "cpu", 0, 1)
    assert why.startswith("name: saw step 7 kept in memory of a run")
    agent.release(1, (1, 9), 99, committed=99)
    agent.keep(1, (1, 1, 7))
    assert path.exists()
    agent.close(1)
    marker = kept_slots.read_marker(agent._folder)
    assert marker is not None
    assert (marker["run"], path.exists()) == ("another run", True)
    agent.close(None)
    assert not path.exists(), "a person said so"


def test_a_node_that_sees_another_folder_than_the_coordinator_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: Agent
) -> None:
    """The same absolute path, and on that node nothing, or another run, is mounted there."""
    monkeypatch.setattr(shared_folder, "SEEN_S", 0.3)
    kept = {place: RunLog(LocalStorage(str(tmp_path / place), "night")) for place in ("ours", "theirs")}
    for log in kept.values():
        log.claim_term("coordinator")
    run = kept["ours"].identity

    def objected(place: str) -> str:
        storage = agent._job.storage.model_copy(update={"url": str(tmp_path / place)})
        agent._job = agent._job.model_copy(update={"storage": storage, "name": "night"})
        said = agent.hello(1, run)
        return objection(agent._job, said, said["versions"], "cpu", 0, 1)

    for place, seen in (("nothing", "no"), ("theirs", "another")):
        there = (
            f"storage.url: saw {seen} run 'night' in {tmp_path / place}/night on node {os.uname().nodename}"
        )
        assert objected(place).startswith(there)
    assert not (tmp_path / "nothing").exists(), "a look leaves nothing"
    assert objected("ours") == ""
    shutil.rmtree(tmp_path / "ours")
    assert objected("ours") == "", "it was seen; this is an outage"


def test_a_living_workers_slot_is_unmarked_and_stays(agent: Agent) -> None:
    page_of(agent, "w1")
    mine = slot_of(agent, "w1", 7)
    agent.keep(1, (1, 1, 7))
    agent.release(1, (1, 1), 7, committed=7)
    assert agent._kept.told("")["kept"] == ()
    assert mine.exists()


@pytest.mark.parametrize(
    ("keep", "left"), [((1, 1, 7), {7}), ((), {6, 7}), (None, set()), ((1, 1, 9), set())]
)
def test_an_end_keeps_what_it_is_told_to(agent: Agent, keep: Any, left: set[int]) -> None:
    for index, step in enumerate((6, 7)):
        slot_of(agent, "w1", step, index=index)
    agent.close(None, keep)
    there = {path.name for path in agent._folder.glob("*")}
    assert there == {f"w1.{step - 6}.slot" for step in left} | ({kept_slots.MARKER} if left else set())


def test_an_end_by_hand_keeps_what_is_marked_alone(agent: Agent) -> None:
    for index, step in enumerate((6, 7)):
        slot_of(agent, "w1", step, index=index)
    agent.keep(1, (1, 1, 7))
    agent.close(None, kept_slots.MARKED_ALONE)
    assert {path.name for path in agent._folder.glob("*")} == {"w1.1.slot", kept_slots.MARKER}


def test_the_next_launchs_agent_takes_over_what_a_dead_node_kept(agent: Agent) -> None:
    slot_of(agent, "w1", 7)
    agent.close(None, ())
    fresh = Agent(agent._job.model_dump(mode="json"), "n2", "127.0.0.1")
    (info,) = fresh._kept.told("")["kept"]
    assert (info.node, info.slot, info.step) == ("n2", "w1.0.slot", 7)
    assert [slot.slot for slot in fresh.inventory(2)] == ["w1.0.slot"]
    assert not agent._folder.exists()
    fresh.close(None)


def test_an_exit_is_told_once(agent: Agent, told: Told) -> None:
    alive, dead = page_of(agent, "w1"), page_of(agent, "w2")
    dead.put(start_ticks=1)
    agent._look(1.0, heartbeat=False)
    assert told == [("worker_exited", "w2", "process gone")]
    told.clear()
    agent._look(1.0, heartbeat=True)
    ((name, node, beats),) = told
    assert (name, node, list(beats)) == ("heartbeats", "n1", ["n1"])
    assert [page["worker"] for page in beats["n1"]] == ["w1"]
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
    monkeypatch.setattr(agent._stalls.cpu_use, "excuses", lambda *_: excused[0])
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


def test_a_coordinator_that_begins_is_told_of_all_that_is_pinned(agent: Agent, told: Told) -> None:
    """The one before may have died between a failed upload and the next, or with a release on its way."""

    def pins() -> dict[tuple[int, ...], list[str]]:
        agent._look(1.0, heartbeat=False)
        seals = [words[2:] for words in told if words[0] == "sealed"]
        found = {(*of, step): [info.slot for info in slots] for of, step, slots in seals}
        told.clear()
        return found

    page = page_of(agent, "w1", n=2)
    for worker, n, step, index in (
        ("gone", 1, 4, 0), ("w1", 1, 4, 0), ("w1", 2, 6, 1), ("w1", 2, 8, 2), ("gone", 2, 9, 1)
    ):  # fmt: skip
        slot_of(agent, worker, step, n=n, index=index)
    kept = slot_of(agent, "gone", 3, index=2)
    kept_slots.mark(agent._folder, {kept.name: 3}, None, "another run")
    page.put(pinned=8)
    everything = {(1, 1, 4): ["gone.0.slot", "w1.0.slot"], (1, 2, 6): ["w1.1.slot"], (1, 2, 8): ["w1.2.slot"]}
    assert pins() == everything, "but of what a dead member alone has sealed, and of what a launch kept"
    assert pins() == {}
    agent.hello(2, "")
    assert pins() == everything
    agent.release(2, (1, 2), 6)
    agent.hello(2, "")
    assert pins() == {(1, 2, 8): ["w1.2.slot"]}
    page.put(pid=0)
    agent.hello(3, "")
    assert pins()[1, 2, 9] == ["gone.1.slot"], "nobody lives who could seal more of it"


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
    config = job(metrics__enabled=False, snapshot__folder=str(tmp_path)).model_dump(mode="json")
    agent = Agent(config, "n1", "127.0.0.1")
    assert enough.wait(10)
    agent.close(1)
    assert looks[:4] == [True, False, False, False]
    assert not (tmp_path / "night").exists()


# --- executor --------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(command_executor, "UNAVAILABLE_RETRY_S", 0.0)
    made = Bench()
    yield made
    made.loop.run_until_complete(made.loop.shutdown_default_executor())
    made.loop.close()


def test_starts_and_kills_come_back_as_events(bench: Bench) -> None:
    assert bench.run(m.StartWorker("w1", "n1")) == [m.WorkerReady("w1", "n1")]
    bench.executor._store.data = "aa"
    bench.calls.answers["start"] = ["aa", "bb"]
    same, other = bench.run(m.StartWorker("w1", "n1"), m.StartWorker("w2", "n2"))
    assert (same, other) == (m.WorkerReady("w1", "n1"), m.WorkerReady("w2", "n2", other.refused))
    assert "fingerprint bb, expected aa" in other.refused
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
    end = m.Outcome("w2", A, "finished", 9)
    bench.calls.answers = {"store": [("h", 1)], "run_generation": [RayError("a\nb"), end]}
    assert bench.run(m.RunGeneration(SPEC)) == [m.Outcome("w1", A, FailureKind.FAILED, -1, "error: b"), end]


def test_a_worker_that_ray_killed_for_memory_is_told_from_one_that_died(bench: Bench) -> None:
    end = m.Outcome("w2", A, "finished", 9)
    bench.calls.answers = {"store": [("h", 1)], "run_generation": [OutOfMemoryError("node is full"), end]}
    killed = m.WorkerExited("w1", "oom: killed by Ray, whose node ran low on memory")
    assert bench.run(m.RunGeneration(SPEC)) == [killed, end]
    assert sign_of(killed) == (FailureKind.OUT_OF_MEMORY, "w1")
    assert sign_of(m.WorkerExited("w1", "process gone")) == (FailureKind.WORKER_EXITED, "w1")
    failed = m.Outcome("w1", A, FailureKind.FAILED, 3, "oom: tried to allocate 3 GiB")
    assert sign_of(failed) == (FailureKind.OUT_OF_MEMORY, "w1")


def test_questions_go_to_the_planner(bench: Bench) -> None:
    questions = (m.LayoutQuestion(4), m.LayoutQuestion(3))
    assert bench.run(m.PlanLayouts(questions)) == []
    assert bench.planned == [questions]


def test_without_a_store_only_members_elsewhere_join(bench: Bench) -> None:
    dead = RayActorError(error_msg="gone")
    bench.calls.answers = {"store": [dead], "run_generation": [m.Outcome("w2", A, "finished", 9)]}
    assert bench.run(m.RunGeneration(SPEC)) == [
        m.NodeLost("n1", f"no rendezvous store: {dead}"), m.Outcome("w2", A, "finished", 9)
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
    assert bench.run(ask) == [], "an error says nothing of its slots: the machine asks again"


def test_uploads_are_kept_for_their_commit(bench: Bench) -> None:
    bench.calls.answers["upload"] = [RayError("down"), TimeoutError()]
    upload = m.Upload("n1", A, 5, ("s",))
    asked = ("n1", "upload", 3, (1, 1), 5, ("s",))
    assert bench.run(upload) == [m.Uploaded("n1", A, 5, "down", ("s",))]
    assert bench.run(upload) == [], "it has only begun"
    assert bench.calls.seen == [asked] * 3, "silence is asked again"
    bench.run(m.Upload("n2", A, 6, ("t",)))
    bench.executor.uploaded("n1", Ended((1, 1), 5, ("s",), None, "gone:s.slot"))
    bench.executor.uploaded("n1", Ended((1, 1), 5, ("s",), b"1"))
    bench.executor.uploaded("n2", Ended((1, 1), 6, ("t",), b"2"))
    assert bench.run() == [
        m.Uploaded("n1", A, 5, "gone:s.slot", ("s",)),
        m.Uploaded("n1", A, 5, "", ("s",)),
        m.Uploaded("n2", A, 6, "", ("t",)),
    ]
    bench.calls.seen.clear()
    bench.seq = 0
    assert bench.run(m.AppendCommit(A, 5, ("n1", "n9"))) == [m.Appended("commit", A, 5, 0)]
    bench.seq = 7
    assert bench.run(m.AppendCommit(A, 5, ("n1",))) == [m.Appended("commit", A, 5, 7)]
    after = [("garbage",), ("record", b'{"seq":9}')]
    assert sorted(bench.calls.seen) == after, "only after a commit that was made"
    bench.run(m.AppendCommit(A, 5, ("n1",)), m.AppendCommit(A, 6, ("n2",)))
    assert bench.committed == [
        (A, 5, []), (A, 5, [b"1"]), (A, 5, []), (A, 6, [b"2"])
    ]  # fmt: skip
    assert bench.run(m.AppendGeneration(SPEC)) == [m.Appended("generation", A, 0, 1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_uploads_of_a_state_the_part_of_the_newest_is_committed(
    bench: Bench, order: tuple[int, int]
) -> None:
    """Whichever ends first: the state was planned anew when another node was lost."""
    for slots in (("b1",), ("b1", "b2")):
        bench.run(m.Upload("b", A, 5, slots))
    ends = [Ended((1, 1), 5, slots, repr(slots).encode()) for slots in (("b1",), ("b1", "b2"))]
    for at in order:
        assert (bench.executor._uploads.open("b") is None) == (at == 0 and order[0] == 1)
        bench.executor.uploaded("b", ends[at])
    assert [event.slots for event in bench.run() if isinstance(event, m.Uploaded)] == [
        ends[at].slots for at in order
    ]
    bench.run(m.AppendCommit(A, 5, ("b",)))
    assert bench.committed == [(A, 5, [repr(("b1", "b2")).encode()])]


def test_storage_that_is_full_is_collected_before_the_next_try(bench: Bench) -> None:
    """A collection after the next commit would wait for a commit that has no room."""

    async def hear() -> None:
        bench.executor.uploaded("n1", Ended((1, 1), 5, ("s",), None, "no room", full=True))

    bench.loop.run_until_complete(hear())
    assert bench.run() == [m.Uploaded("n1", A, 5, "no room", ("s",))]
    assert ("garbage",) in bench.calls.seen


def test_the_machine_hears_what_a_collection_has_retired(bench: Bench) -> None:
    bench.seq, bench.retired = 7, ["manifests/1", "manifests/2"]
    heard = bench.run(m.AppendCommit(A, 5, ()))
    assert heard == [m.Appended("commit", A, 5, 7), m.Retired(("manifests/1", "manifests/2"))]
    bench.retired = []
    assert bench.run(m.AppendCommit(A, 6, ())) == [m.Appended("commit", A, 6, 7)]


def test_an_upload_that_died_with_its_agent_is_asked_for_again(bench: Bench) -> None:
    """Nobody else would for ten times the deadline of storage."""
    bench.run(m.Upload("n1", A, 5, ("s",)), m.Upload("n2", A, 5, ("t",)))
    bench.executor.uploaded("n2", Ended((1, 1), 5, ("t",), b""))
    bench.calls.seen.clear()

    async def back() -> None:
        for node in ("n1", "n2", "n3"):
            bench.executor.agent_back(node)

    bench.loop.run_until_complete(back())
    bench.run()
    assert bench.calls.seen == [("n1", "upload", 3, (1, 1), 5, ("s",))], "n2 has ended its own"


def test_a_strike_is_in_storage_before_any_generation_follows(bench: Bench) -> None:
    bench.run(m.Alert("warning", "x ran out of memory", STRUCK), m.Alert("info", "x", "join"))
    assert bench.calls.seen == [("record", b'{"seq":9}')]


def test_a_strike_is_in_storage_while_a_commit_hangs(bench: Bench) -> None:
    """What ran out of memory would be tried again by the next coordinator."""
    begun, go = threading.Event(), threading.Event()
    bench.on_commit = lambda: begun.set() or go.wait(10.0)
    bench.executor.carry_out(m.AppendCommit(A, 5, ()))
    bench.loop.run_until_complete(asyncio.sleep(0.05))
    assert begun.wait(5.0)
    bench.executor.carry_out(m.Alert("warning", "x ran out of memory", STRUCK))
    bench.loop.run_until_complete(asyncio.sleep(0.05))
    assert bench.executor.keeper.wait(5.0)
    assert (bench.calls.seen, bench.committed) == ([("record", b'{"seq":9}')], [])
    go.set()
    assert bench.run() == [m.Appended("commit", A, 5, 7)]


def test_orders_go_to_those_that_they_name(bench: Bench) -> None:
    bench.calls.answers["quarantine"] = [RayError("x")]
    bench.calls.answers["interrupt"] = [RayError("x")]
    orders = (
        m.Interrupt("w1", A, "hard"), m.TakeSnapshot(A, ("w1", "w2")), m.Release("n1", A, 5, 4),
        m.Quarantine("n1", "s", A, 3), m.Alert("warning", "text", "kind", {"x": 1}),
    )  # fmt: skip
    assert bench.run(*orders) == []
    assert bench.calls.seen == [
        ("n1", "release", 3, (1, 1), 5, (), 4),
        ("n1", "quarantine", 3, "s", (1, 1, 3)),
        ("w1", "interrupt", 3, (1, 1), "hard"),
        ("w1", "interrupt", 3, (1, 1), "snapshot"),
        ("w2", "interrupt", 3, (1, 1), "snapshot"),
        ("n1w", "committed", 3, (1, 1), 4),
    ]
    assert bench.notes == [("warning", "kind", "text", {"x": 1})]


def test_what_a_generation_left_is_set_apart_from_the_garbage_collector(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection over thousands of workers in the midst of a loss takes longer than to decide it."""
    did: list[int] = []
    monkeypatch.setattr(command_executor, "SETTLED_S", 0.05)
    monkeypatch.setattr(bench.executor.garbage, "calm", lambda: did.append(len(bench.calls.seen)))
    ends = [m.Outcome(member.worker, A, "finished", 9) for member in SPEC.members]
    bench.calls.answers = {"store": [("host", 1)], "run_generation": ends}
    bench.run(m.RunGeneration(SPEC))
    bench.loop.run_until_complete(asyncio.sleep(0.1))
    assert did == [len(SPEC.members)], "once, and after all members were called"


def test_members_on_nodes_that_were_not_heard_are_joined_where_they_train(bench: Bench) -> None:
    """Without a handle their calls would fail, and they would count as dead."""
    ends = [m.Outcome(member.worker, A, "finished", 9) for member in MEMBERS]
    bench.calls.answers = {"store": [("h", 1)] * 2, "run_generation": [*ends, *ends]}
    assert bench.run(m.RunGeneration(SPEC, adopt=True)) == ends
    assert ("adopt", *MEMBERS) in bench.calls.seen
    bench.calls.seen.clear()
    bench.run(m.RunGeneration(SPEC))
    assert ("adopt", *MEMBERS) not in bench.calls.seen


class Lookups:
    """Ray's names: who asks for them, and in which thread."""

    def __init__(self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.threads: set[int] = set()
        self._nodes = nodes
        monkeypatch.setattr(cluster_module.ray, "get_actor", self._find)

    def _find(self, name: str, namespace: str) -> Any:
        self.names.append(name.rpartition("/")[2])
        self.threads.add(threading.get_ident())
        if "ghost" in name:
            raise ValueError(name)
        return self._nodes._agent("found")


@pytest.fixture
def lookups(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Lookups:
    return Lookups(nodes, monkeypatch)


def test_thousands_of_adopted_workers_are_looked_up_when_they_are_called_and_off_the_loop(
    nodes: Nodes, lookups: Lookups
) -> None:
    """Each takes over half a millisecond of Ray's time: heartbeats would wait 10 s for 16,384 of them."""
    members = tuple(m.Member(f"w{number}", f"n{number // 8}") for number in range(16_384))
    cluster = nodes.cluster
    cluster.adopt_workers((*members, m.Member("ghost", "n0")))
    cluster.adopt_workers(members)
    assert lookups.names == []
    assert cluster.workers_on("n1") == [f"w{number}" for number in range(8, 16)]

    async def work() -> None:
        for _ in range(2):
            assert await cluster.call_worker("w9", "close") == ["found"]
        with pytest.raises(RayActorError, match="worker ghost is gone"):
            await cluster.call_worker("ghost", "close")
        cluster.gone("ghost")
        with pytest.raises(RayActorError, match="worker ghost is gone"):
            await cluster.call_worker("ghost", "close")

    asyncio.run(work())
    assert lookups.names == ["w9", "ghost"]
    assert threading.get_ident() not in lookups.threads


def test_a_worker_that_ends_while_it_is_looked_up_stays_forgotten(nodes: Nodes, lookups: Lookups) -> None:
    nodes.cluster.adopt_workers((m.Member("w1", "a"),))

    async def work() -> None:
        call = asyncio.create_task(nodes.cluster.call_worker("w1", "close"))
        while not lookups.names:
            await asyncio.sleep(0.001)
        nodes.cluster.gone("w1")
        await call

    asyncio.run(work())
    assert (nodes.cluster._workers, nodes.cluster.workers_on("a")) == ({}, [])


def test_adopted_workers_are_ended_though_they_were_never_called(nodes: Nodes, lookups: Lookups) -> None:
    """Their agent does it; where it does not answer, Ray is asked for them."""
    cluster = nodes.cluster
    cluster._agents.update({node: nodes._agent(node) for node in ("a", "b")})
    cluster.adopt_workers((m.Member("w1", "a"), m.Member("w2", "b"), m.Member("w3", "gone")))
    cluster.adopt_workers((m.Member("w4", "a"), m.Member("w5", "b")))
    nodes.errors = {"close b": RayActorError(), "kill b": RayActorError()}
    asyncio.run(nodes.kill("w4"))
    assert (lookups.names, nodes.killed) == ([], [])
    asyncio.run(nodes.kill("w5"))
    assert (len(lookups.names), len(nodes.killed)) == (1, 1)
    asyncio.run(cluster.close(1))
    assert sorted(lookups.names) == ["w2", "w3", "w5"]
    assert len(nodes.killed) == 1 + len(("w2", "w3", "agent a", "agent b"))
    assert threading.get_ident() not in lookups.threads


def test_agents_are_looked_up_off_the_loop(nodes: Nodes, lookups: Lookups) -> None:
    nodes.views = [view("a"), view("b"), view("ghost")]
    nodes.errors["figures"] = RayActorError()
    asyncio.run(nodes.cluster.hello(1))
    asyncio.run(nodes.cluster.activity())
    assert (len(lookups.names), sorted(nodes.cluster._agents)) == (6, ["a", "b"])
    assert threading.get_ident() not in lookups.threads


def test_many_workers_are_told_in_one_call_for_each_node(bench: Bench) -> None:
    workers = [f"n{at % 2}/w{at}" for at in range(worker_orders.FEW + 2)]
    bench.run(*(m.Interrupt(worker, A, "hard") for worker in workers))
    assert bench.calls.seen == [
        (node, "order", 3, [w for w in workers if w.startswith(node)], "interrupt", [(1, 1), "hard"])
        for node in ("n0", "n1")
    ]


def test_workers_are_told_directly_where_their_agent_does_not_pass_it_on(bench: Bench) -> None:
    workers = [f"n{at % 2}/w{at}" for at in range(worker_orders.FEW + 2)]
    bench.calls.answers["order"] = [RayError("x"), TimeoutError()]
    bench.run(*(m.Interrupt(worker, A, "hard") for worker in workers))
    direct = [(worker, "interrupt", 3, (1, 1), "hard") for worker in workers]
    assert sorted(bench.calls.seen[2:]) == sorted(direct)


def test_an_agent_that_knows_a_newer_term_stops_the_orders_of_an_older_one(bench: Bench) -> None:
    workers = [f"n0/w{at}" for at in range(worker_orders.FEW + 1)]
    bench.calls.answers["order"] = [FencedError("term 3 is older than 4")]
    (found,) = bench.run(*(m.Interrupt(worker, A, "hard") for worker in workers))
    assert isinstance(found, m.Fenced)
    assert len(bench.calls.seen) == 1


def test_a_task_that_fails_is_noted(bench: Bench) -> None:
    bench.calls.answers["start"] = [RuntimeError("boom")]
    assert bench.run(m.StartWorker("w1", "n1")) == []
    assert bench.notes == [("error", "internal", "coordinator: a task: RuntimeError('boom')")]
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


def asked_to_join(nodes: Nodes) -> int:
    """Number of times that an agent was asked what it is; those that look for its life name no run."""
    return sum(len(arguments) == 2 for arguments in nodes.seen)


def test_a_refused_node_is_asked_again_each_minute_and_told_once_it_may_take_part(nodes: Nodes) -> None:
    """Its folder was mounted late, or others held its memory: it was out as long as the coordinator lived."""
    nodes.views = [view("a"), view("b")]
    nodes.hello["a"] = {"problem": "saw room for 3 GB"}
    assert nodes.changes() == [m.NodeJoined("a", 4, "saw room for 3 GB"), m.NodeJoined("b", 4)]
    nodes.now += cluster_module.ASK_AGAIN_S - 1
    assert (nodes.changes(), asked_to_join(nodes)) == ([], 2)
    nodes.now += 1
    nodes.hello["a"] = {"problem": "saw room for 4 GB"}
    assert (nodes.changes(), asked_to_join(nodes)) == ([], 3), "it is not told again each minute"
    nodes.hello["a"] = {}
    assert (nodes.changes(), asked_to_join(nodes)) == ([], 3)
    nodes.now += cluster_module.ASK_AGAIN_S
    assert nodes.changes() == [m.NodeJoined("a", 4)]
    nodes.now += cluster_module.ASK_AGAIN_S
    assert (nodes.changes(), asked_to_join(nodes)) == ([], 4)
    nodes.views = [view("a", free=2.0), view("b")]
    assert nodes.changes() == [m.NodeJoined("a", 2)]
    nodes.views = [view("b")]
    assert nodes.changes() == [m.NodeLost("a", "Ray reports it dead")], "it is there once"


def test_a_refused_node_that_is_lost_is_asked_no_more(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.hello["a"] = {"problem": "no room"}
    nodes.changes()
    nodes.views = []
    assert nodes.changes() == [m.NodeLost("a", "Ray reports it dead")]
    nodes.now += cluster_module.ASK_AGAIN_S
    assert (nodes.changes(), asked_to_join(nodes)) == ([], 1)


def test_only_a_few_refused_nodes_are_asked_at_a_time(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "LOOK_S", 0.01)
    names = [f"n{number}" for number in range(10)]
    nodes.views = [view(name) for name in names]
    nodes.hello = {name: {"problem": "no room"} for name in names}
    assert len(nodes.changes()) == 10
    nodes.now += cluster_module.ASK_AGAIN_S
    nodes.frozen = set(names)

    async def looks() -> None:
        for _ in range(3):
            assert await nodes.cluster.changes(1) == []
            assert asked_to_join(nodes) == 10 + cluster_module.MOST_ASKED

    asyncio.run(looks())
    nodes.frozen, nodes.hello = set(), {}
    nodes.cluster._joining.clear()
    nodes.now += cluster_module.ASK_AGAIN_S
    back = [nodes.changes() for _ in range(3)]
    assert [len(events) for events in back] == [4, 4, 2]
    assert {event.node for events in back for event in events} == set(names)


def test_room_that_others_take_and_give_is_told(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.changes()
    nodes.cluster._placed.update({"w1": "a", "w2": "b"})
    nodes.views = [view("a", free=3.0)]
    assert nodes.changes() == [], "one worker of ours"
    nodes.views = [view("a", free=2.0)]
    assert nodes.changes() == [m.NodeJoined("a", 3)]
    nodes.cluster.gone("w1")
    assert nodes.changes() == [m.NodeJoined("a", 2)]


def test_a_node_full_of_workers_that_were_forgotten_is_greeted_once_its_agent_is_heard(nodes: Nodes) -> None:
    """They held all its GPUs, so it had no room, and was locked out until the run ended."""
    nodes.views = [view("a"), view("b"), view("others", free=0.0)]
    nodes.changes()
    names = [f"w{number}" for number in range(4)]
    nodes.cluster.adopt_workers(tuple(m.Member(name, "a") for name in names))
    nodes.views[0] = view("a", free=0.0)
    nodes.hello["a"] = {"workers": names}
    nodes.cluster.agent_died("a")  # its store did not start, or its agent raised what nobody expects
    assert nodes.changes() == [], "nothing says that anything of ours lives there"
    nodes.cluster.heard("a")
    assert nodes.changes() == [m.NodeJoined("a", 4, idle=tuple(names))]
    assert asked_to_join(nodes) == 3, "a node that others fill is asked nothing"
    nodes.cluster.agent_died("a")
    nodes.cluster.heard("a")
    nodes.now += 60.0
    assert nodes.changes() == [], "it was heard long ago"


def test_a_full_node_whose_agent_was_silent_at_the_beginning_is_greeted_later(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greetings, "HELLO_S", 0.05)
    monkeypatch.setattr(cluster_module.ray, "get_actor", lambda name, namespace: nodes._agent(name[-1]))
    nodes.views, nodes.frozen = [view("a", free=0.0), view("b")], {"a"}
    nodes.hello["a"] = {"workers": ["w0"]}
    assert set(asyncio.run(nodes.cluster.hello(1))) == {"b"}
    nodes.frozen.clear()
    assert nodes.changes() == [m.NodeJoined("a", 1, idle=("w0",)), m.NodeJoined("b", 4)]


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
    nodes.restarting = True
    assert nodes.changes() == [m.AgentRestarting("b")]
    nodes.cluster.agent_back("b", {"address": "moved"})
    assert (nodes.changes(), nodes.cluster.metrics["b"]) == ([], {"address": "moved"})


def test_an_agent_that_is_started_again_is_waited_for(nodes: Nodes) -> None:
    nodes.cluster._agents["a"] = nodes._agent("a")
    nodes.away = 3
    assert asyncio.run(nodes.cluster.call_agent("a", "figures")) == ["a"]
    nodes.away = 100
    with pytest.raises(ActorUnavailableError):
        asyncio.run(nodes.cluster.call_agent("a", "figures"))
    assert nodes.away >= 100 - ray_calls.AGENT_BACK_S - 1


def test_a_worker_is_killed_once_its_agent_is_back(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.hello["a"] = {"workers": ["w1"]}
    nodes.changes()
    nodes.away, before = 2, len(nodes.seen)
    asyncio.run(nodes.kill("w1", term=4))
    assert len(nodes.killed) == 1, "through Ray, meanwhile"
    assert nodes.seen[before:] == [(4, "w1")] * 3


def test_an_end_waits_for_an_agent_that_is_started_again(nodes: Nodes) -> None:
    nodes.cluster._agents["a"] = nodes._agent("a")
    nodes.away = 2
    asyncio.run(nodes.cluster.close(1))
    assert (nodes.away, nodes.seen) == (0, [(1, None)] * 3)
    nodes.away = 100
    asyncio.run(nodes.cluster.close(1))
    assert len(nodes.killed) == 2
    assert nodes.away > 80, "but not for ever"


def test_strangers_on_a_node_are_ready_workers(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.hello["a"] = {"workers": ["w1", "ghost"], "busy": [("ghost", 1, 2)]}
    assert nodes.changes() == [
        m.NodeJoined("a", 4, idle=("w1",)), m.WorkerReady("ghost", "a")
    ]  # fmt: skip
    assert nodes.cluster.workers_on("a") == ["w1", "ghost"], "what there is of it is judged by the machine"
    assert nodes.cluster._placed == {"w1": "a", "ghost": "a"}
    for worker in ("w1", "ghost"):
        asyncio.run(nodes.kill(worker))
    assert (nodes.cluster.workers_on("a"), nodes.cluster._placed) == ([], {})


def test_drains_are_told_as_long_as_they_last_in_our_own_time(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.changes()
    nodes.drains = {"a": 1030.0, "b": 0.0, "c": 5.0}
    for _ in range(2):
        notices = asyncio.run(nodes.cluster.drains())
        assert notices == [m.DrainNotice("a", 130.0), m.DrainNotice("b", 0.0)]


def test_a_draining_node_is_not_taken_in_and_a_freed_one_not_again(nodes: Nodes) -> None:
    nodes.views, nodes.drains = [view("a"), view("b")], {"a": 1030.0}
    nodes.hello["b"] = {"workers": ["w1"]}
    assert nodes.changes() == [m.NodeJoined("b", 4, idle=("w1",))]
    nodes.drains["b"] = 1030.0
    asyncio.run(nodes.cluster.free(1, "b", says(True)))
    assert nodes.seen[-1] == (1, None), "its agent keeps no slot"
    assert len(nodes.killed) == 1, "the agent, which has ended its worker"
    assert nodes.changes() == []
    nodes.views = []
    assert nodes.changes() == [], "its end is no loss"
    asyncio.run(nodes.cluster.free(1, "b", says(True)))
    assert len(nodes.killed) == 1


def says(newest: bool | None) -> Any:
    async def is_newest() -> bool | None:
        return newest

    return is_newest


@pytest.mark.parametrize(("newest", "killed"), [(True, 2), (False, 0), (None, 0)])
def test_a_node_whose_agent_says_nothing_is_freed_by_the_newest_term_alone(
    nodes: Nodes, newest: bool | None, killed: int
) -> None:
    nodes.views = [view("a")]
    nodes.hello["a"] = {"workers": ["w1"]}
    nodes.changes()
    nodes.errors["close"] = TimeoutError()
    asyncio.run(nodes.cluster.free(1, "a", says(newest)))
    assert len(nodes.killed) == killed


def test_a_worker_that_an_earlier_coordinator_was_starting_can_be_killed(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.changes()
    before = len(nodes.seen)
    nodes.cluster.note_workers("a", ["w9"])
    asyncio.run(nodes.kill("w9", newest=None))
    assert nodes.seen[before:] == [(1, "w9")], "by its node's agent"


def test_drains_and_deaths_are_heard_while_an_agent_hangs(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "LOOK_S", 0.01)
    nodes.views = [view("a"), view("b")]

    async def slow(reference: Any, timeout_s: float | None = None) -> Any:
        if reference == ("slow", "hello"):
            await hung.wait()
        return await Nodes._answer(nodes, reference, timeout_s)

    async def watch() -> list[Any]:
        found = [await nodes.cluster.changes(1)]
        nodes.views = [view("a"), view("slow")]
        nodes.drains = {"a": 1030.0}
        found += [await nodes.cluster.changes(1), await nodes.cluster.drains()]
        hung.set()
        found.append(await nodes.cluster.changes(1))
        hung.clear()
        nodes.views = [view("slow", free=2.0)]
        return [*found, await nodes.cluster.changes(1)]

    hung = asyncio.Event()
    monkeypatch.setattr(cluster_module, "answer", slow)
    _, lost, drains, joined, later = asyncio.run(watch())
    assert lost == [m.NodeLost("b", "Ray reports it dead")]
    assert drains == [m.DrainNotice("a", 130.0)]
    assert joined == [m.NodeJoined("slow", 4)]
    assert later == [m.NodeLost("a", "Ray reports it dead"), m.NodeJoined("slow", 2)]


def test_a_node_that_dies_while_its_agent_comes_up_is_forgotten(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "LOOK_S", 0.01)
    hung = asyncio.Event()

    async def slow(reference: Any, timeout_s: float | None = None) -> Any:
        await hung.wait()
        return await Nodes._answer(nodes, reference, timeout_s)

    async def watch() -> list[Any]:
        nodes.views = [view("a")]
        found = [await nodes.cluster.changes(1)]
        hung.set()
        nodes.views = []
        return [*found, await nodes.cluster.changes(1), await nodes.cluster.changes(1)]

    monkeypatch.setattr(cluster_module, "answer", slow)
    assert asyncio.run(watch()) == [[], [], []]


def test_a_fault_unplugs_the_node_of_its_number(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.changes()
    told: list[str] = []
    for node, handle in nodes.cluster._agents.items():
        monkeypatch.setattr(handle, "die", SimpleNamespace(remote=lambda node=node: told.append(node)))
    for index in (1, 2, 0):
        nodes.cluster.remove_node(index)
    assert told == ["b", "a"]


def test_an_agent_that_has_closed_is_not_asked_again_where_another_refused(nodes: Nodes) -> None:
    """It is gone: its silence would say that its slots are not marked as kept."""
    nodes.views = [view("a"), view("b")]
    nodes.changes()
    nodes.errors["close b"] = refused()
    with pytest.raises(FencedError, match="term 3 is older than 4"):
        asyncio.run(nodes.cluster.close(3))
    assert len(nodes.killed) == 1
    del nodes.errors["close b"]
    nodes.seen.clear()
    assert asyncio.run(nodes.cluster.close(4, m.Source("slots"))) == {}
    assert nodes.seen == [(4, ())], "the other one alone"


def test_an_end_closes_all_there_is(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.hello["a"] = {"workers": ["w1"]}
    nodes.changes()
    assert asyncio.run(nodes.cluster.figures()) == {"a": ["a"], "b": ["b"]}
    asyncio.run(nodes.cluster.close(1))
    assert len(nodes.killed) == 2, "the agents, which have ended the workers"
    assert nodes.seen[-2:] == [(1, None)] * 2
    asyncio.run(nodes.cluster.close(1, finished=False))
    assert nodes.seen[-2:] == [(1, kept_slots.MARKED_ALONE)] * 2, "what is marked is not committed"
    asyncio.run(nodes.cluster.close(1, m.Source("slots", 7, B)))
    assert nodes.seen[-2:] == [(1, (1, 2, 7))] * 2
    asyncio.run(nodes.cluster.close(1, m.Source("slots")))
    assert nodes.seen[-2:] == [(1, ())] * 2


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
    assert nodes.changes() == [m.NodeJoined("a", 4, kept=(info,), kept_by=slim(SPEC))]


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
    assert nodes.changes()[0] == m.NodeJoined("a", 4, idle=("w1",)), "a fresh agent"


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
    assert list(found) == ["a"]
    assert list(nodes.cluster._agents) == ["a", "b"], "it may answer what it is asked later"
    assert nodes.cluster.metrics == {"a": {"address": "a"}}


def test_a_store_is_asked_for_where_rank_0_is_until_it_has_failed_twice(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, or without an answer: it is replaced where it is, and on another node the second time."""
    answers: list[Any] = [("n1", 9, replaced) for replaced in range(3)]
    answers += [("n2", 9, 0), TimeoutError(), TimeoutError()]

    async def call_agent(node: str, method: str, **limits: float) -> Any:
        assert limits == dict.fromkeys(("timeout_s", "patience_s"), job().elastic.node_timeout_s / 2)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cluster = nodes.cluster
    monkeypatch.setattr(cluster, "call_agent", call_agent)
    asked = []
    while answers:
        asked.append(cluster.store_home(SPEC))
        with contextlib.suppress(TimeoutError):
            assert asyncio.run(cluster.store_address(asked[-1])) == (asked[-1], 9)
    assert asked == ["n1", "n1", "n1", "n2", "n2", "n2"]
    assert cluster.store_home(SPEC) == "n1", "both failed twice"
    nodes.views = [view("n1"), view("n2")]
    nodes.changes()
    cluster.agent_died("n1")
    assert cluster._stores.failures["n1"] == 0, "its successor is another"


def test_a_store_whose_predecessors_froze_twice_is_not_used_where_there_is_another(bench: Bench) -> None:
    """The node's answer tells of the second one: the generation at hand goes elsewhere, not the one after."""
    ends = [m.Outcome(member.worker, A, "finished", 9) for member in MEMBERS]
    homes = ["n1", "n2", "n2", "n2"]
    bench.calls.store_home = lambda spec: homes.pop(0)  # type: ignore[method-assign]
    bench.calls.answers = {"store": [("h", 1), ("h", 2)], "run_generation": list(ends)}
    assert bench.run(m.RunGeneration(SPEC)) == ends
    assert [words for words in bench.calls.seen if words[1] == "run_generation"] == [
        (member.worker, "run_generation", 3, SPEC, ("h", 2)) for member in MEMBERS
    ]


def test_a_store_without_an_answer_is_asked_for_until_the_generation_is_given_up(bench: Bench) -> None:
    later = replace(SPEC, id=B)
    ends = [m.Outcome(member.worker, B, "finished", 9) for member in MEMBERS]
    bench.calls.answers = {"store": [*[TimeoutError()] * 8, ("h", 1)], "run_generation": list(ends)}
    assert bench.run(m.RunGeneration(SPEC), m.RunGeneration(later)) == ends
    specs = [words[3] for words in bench.calls.seen if words[1] == "run_generation"]
    assert specs == [later, later]


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


# --- refusals, silence and errors --------------------------------------------------------------------


def refused() -> RayError:
    """What Ray raises where an agent refuses an older term."""
    error = RayError("refused")
    error.cause = FencedError("term 3 is older than 4")  # type: ignore[attr-defined]
    return error


FENCED = m.Fenced("term 3 is older than 4")


@pytest.mark.parametrize(
    ("command", "method"),
    [
        (m.CollectInventory("n1", 4), "inventory"), (m.KillWorker("w1", "x"), "kill"),
        (m.Upload("n1", A, 5, ("s",)), "upload"), (m.Release("n1", A, 5, 4), "release"),
        (m.Quarantine("n1", "s", A, 3), "quarantine"), (m.KeepSlots("n1", A, 5), "keep"),
        (m.RunGeneration(SPEC), "store"), (m.RunGeneration(SPEC), "run_generation"),
    ],
)  # fmt: skip
def test_a_refusal_by_a_newer_term_is_told_at_once(bench: Bench, command: m.Command, method: str) -> None:
    bench.calls.answers = {"store": [("h", 1)], "run_generation": [m.Outcome("w", A, "finished", 1)] * 2}
    bench.calls.answers[method] = [refused(), refused()]
    assert FENCED in bench.run(command)


def test_a_node_that_did_not_mark_its_slots_is_named(bench: Bench) -> None:
    bench.calls.answers = {"keep": [unmarked(), TimeoutError()]}
    assert bench.run(m.KeepSlots("n1", A, 7), m.KeepSlots("n2", A, 7)) == []
    assert bench.notes == [
        ("warning", "kept", f"node {node} did not mark step 7 as kept: {why}", {"node": node, "step": 7})
        for node, why in (("n1", "step 7 cannot be marked as kept: full"), ("n2", "TimeoutError"))
    ]


def test_an_agents_error_is_tried_again_before_it_counts_as_a_loss(bench: Bench) -> None:
    ends = [m.Outcome(member.worker, A, "finished", 9) for member in MEMBERS]
    errors = [RayError("too many open files")] * (command_executor.MOST_TRIES - 1)
    bench.calls.answers = {"store": [*errors, TimeoutError(), ("h", 1)], "run_generation": list(ends)}
    assert bench.run(m.RunGeneration(SPEC)) == ends
    bench.calls.answers = {"store": [*errors, RayError("too many open files")], "run_generation": [ends[1]]}
    lost = m.NodeLost("n1", "no rendezvous store: too many open files")
    assert bench.run(m.RunGeneration(SPEC)) == [lost, ends[1]]


def test_an_agent_that_fails_to_answer_is_asked_again_before_it_counts_as_dead(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.changes()
    nodes.changes()
    nodes.hello = {"a": RayError("too many open files"), "b": TimeoutError()}
    nodes.now += cluster_module.SILENT_BEATS * job().elastic.heartbeat_s
    for _ in range(greetings.MOST_ERRORS - 1):
        assert nodes.changes() == []
    assert nodes.changes()[0] == m.NodeLost("a", "its agent died")


def test_a_look_at_frozen_agents_takes_no_longer_than_one_at_others(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes wait for it: a loss elsewhere would be found as late as the frozen one answers."""
    monkeypatch.setattr(greetings, "LOOK_S", 0.05)
    nodes.views = [view(name) for name in "abc"]
    nodes.changes()
    nodes.changes()
    nodes.frozen = {"a", "b"}
    nodes.now += cluster_module.SILENT_BEATS * job().elastic.heartbeat_s
    nodes.hello = {"c": RayActorError(error_msg="gone")}
    began = time.monotonic()
    assert nodes.changes()[0] == m.NodeLost("c", "its agent died")
    assert time.monotonic() - began < 1.0


def test_a_heartbeat_goes_out_whatever_the_rest_of_a_look_runs_into(
    agent: Agent, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(*_: Any) -> None:
        raise ValueError("a page that is torn")

    page_of(agent, "w1")
    for part in (agent._stalls, agent._seal_watch):
        name = "report" if part is agent._stalls else "look"
        with monkeypatch.context() as patch:
            patch.setattr(part, name, torn)
            with pytest.raises(ValueError, match="torn"):
                agent._look(1.0, heartbeat=True)
        assert [words[0] for words in told] == ["heartbeats"]
        told.clear()


def test_want_of_evidence_keeps_no_worker_alive(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    killed: list[int] = []
    page_of(agent, "w1").phase("forward")
    monkeypatch.setattr(stall_watch, "ask_workers", full)
    monkeypatch.setattr(agent_module.os, "kill", lambda pid, signal: killed.append(pid))
    assert agent.kill(1, "w1")
    assert killed == [os.getpid()]


def test_a_worker_whose_files_were_deleted_is_named_and_not_killed_before_they_are_saved(
    agent: Agent, told: Told
) -> None:
    """Seen: the coordinator missed it, and had it killed while its slots were copied."""
    with subprocess.Popen(["sleep", "60"]) as process:
        page_of(agent, "w1").put(pid=process.pid, start_ticks=process_start_ticks(process.pid))
        slot_of(agent, "w1", 3)
        agent._look(1.0, heartbeat=False)
        (agent._folder / "w1.page").unlink()
        agent._look(1.1, heartbeat=True)
        assert told == [("heartbeats", "n1", {"n1": [{"worker": "w1", "rescued": True}]})]
        assert agent.kill(1, "w1") == PUT_OFF
        with pytest.raises(SlotError, match="slots of w1 are being saved"):
            agent.inventory(1)
        told.clear()
        deadline = time.monotonic() + 60.0
        while ("worker_exited", "w1", "its files were deleted") not in told:
            agent._look(time.monotonic(), heartbeat=False)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.wait() == -signal.SIGKILL
    assert not agent.kill(1, "w1")
    assert [slot.step for slot in agent.inventory(1)] == [3]


def test_a_worker_that_trains_on_without_its_files_can_be_seen_and_killed(
    agent: Agent, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page is read where it is open; here that is this process."""
    killed: list[int] = []
    page = page_of(agent, "w1")
    agent._look(1.0, heartbeat=False)
    (agent._folder / "w1.page").unlink()
    monkeypatch.setattr(FolderGuard, "rescued", frozenset())
    monkeypatch.setattr(agent._guard, "_work", Future())  # it is tried, and nothing comes of it
    page.phase("forward", limit_s=0.01)
    time.sleep(0.02)
    agent._look(time.monotonic(), heartbeat=True)
    reports = {words[0]: words for words in told}
    assert [(page["worker"], page["step"]) for page in reports["heartbeats"][2]["n1"]] == [("w1", 3)]
    assert agent.hello(1)["workers"] == ["w1"]
    monkeypatch.setattr(agent_module.os, "kill", lambda pid, signal: killed.append(pid))
    assert agent.kill(1, "w1") is True
    assert killed == [os.getpid()]


def test_a_kill_that_an_agent_puts_off_is_left_to_it(nodes: Nodes, lookups: Lookups) -> None:
    cluster = nodes.cluster
    cluster._agents["a"] = nodes._agent("a")
    cluster.adopt_workers((m.Member("w1", "a"),))
    cluster._workers["w2"], cluster._node_of["w2"] = "handle of w2", "a"
    nodes.kill_answer = PUT_OFF
    for worker in ("w1", "w2"):
        asyncio.run(nodes.kill(worker))
    assert (lookups.names, nodes.killed) == ([], [])
    assert cluster.workers_on("a") == ["w1", "w2"], "its end is told once its slots are saved"
    nodes.kill_answer = True
    asyncio.run(nodes.kill("w2"))
    assert nodes.killed == ["handle of w2"]


def test_one_frozen_agent_keeps_no_other_from_being_heard(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the beginning of a term, and when nodes join."""
    for module, name in ((greetings, "HELLO_S"), (cluster_module, "JOIN_S"), (cluster_module, "LOOK_S")):
        monkeypatch.setattr(module, name, 0.05)
    frozen = nodes.frozen = {"a"}
    nodes.views = [view(name) for name in "abc"]
    monkeypatch.setattr(cluster_module.ray, "get_actor", lambda name, _: nodes._agent(name[-1]))
    assert list(asyncio.run(nodes.cluster.hello(1))) == ["b", "c"]

    async def looks() -> list[Any]:
        first = await nodes.cluster.changes(1)
        frozen.clear()
        await asyncio.sleep(0.06)
        return [first, await nodes.cluster.changes(1), await nodes.cluster.changes(1)]

    joined = {name: m.NodeJoined(name, 4) for name in "abc"}
    assert asyncio.run(looks()) == [[joined["b"], joined["c"]], [], [joined["a"]]]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_term_in_which_no_agent_answers_does_not_begin_as_if_there_were_none(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """All were stopped for a moment: their workers would come to light as strangers, and be killed."""
    monkeypatch.setattr(greetings, "HELLO_S", 0.05)
    frozen = nodes.frozen = {"a", "b"}
    nodes.views = [view(name) for name in "ab"]
    monkeypatch.setattr(cluster_module.ray, "get_actor", lambda name, _: nodes._agent(name[-1]))
    told: list[tuple[str, ...]] = []

    async def begin() -> dict[str, Any]:
        later = partial(setattr, nodes, "now", nodes.now + greetings.ALL_SILENT_S)
        asyncio.get_running_loop().call_later(0.3, frozen.clear if goes_on else later)
        return await nodes.cluster.hello(1, lambda *words: told.append(words))

    assert list(asyncio.run(begin())) == (["a", "b"] if goes_on else [])
    text = "2 of 2 agents do not answer (a, b): they may be training, and are waited for"
    assert told == [("warning", "agents", text)]
    nodes.frozen = {"b"}
    assert list(asyncio.run(nodes.cluster.hello(1))) == ["a"], "nothing ever ran"


@pytest.mark.parametrize(("says", "waits"), [(None, True), (A, True), (B, False)])
def test_a_term_waits_for_those_who_may_train_the_newest_generation(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, says: m.GenerationId | None, waits: bool
) -> None:
    """A spare node that answers does not speak for the silent ones: they would be taken for strangers."""
    monkeypatch.setattr(greetings, "HELLO_S", 0.05)
    nodes.frozen = {"b", "c"}
    nodes.views = [view(name) for name in "abc"]
    nodes.hello = {"a": {"spec": None if says is None else replace(SPEC, id=says)}, "b": {"spec": SPEC_OF_B}}
    monkeypatch.setattr(cluster_module.ray, "get_actor", lambda name, _: nodes._agent(name[-1]))
    told: list[tuple[str, ...]] = []

    async def begin() -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.3, nodes.frozen.discard, "b")
        return await nodes.cluster.hello(1, lambda *words: told.append(words), B)

    assert list(asyncio.run(begin())) == (["a", "b"] if waits else ["a"])
    text = "2 of 3 agents do not answer (b, c): they may be training, and are waited for"
    assert told == ([("warning", "agents", text)] if waits else [])
    assert list(nodes.cluster._agents) == ["a", "b", "c"]


def test_agents_that_are_dead_are_not_waited_for(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.views = [view("a")]
    monkeypatch.setattr(cluster_module.ray, "get_actor", lambda name, _: nodes._agent(name[-1]))
    nodes.hello["a"] = RayActorError(error_msg="gone")
    began = time.monotonic()
    assert asyncio.run(nodes.cluster.hello(1)) == {}
    assert time.monotonic() - began < 10.0


def test_a_node_that_cannot_join_keeps_no_other_from_it(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.hello["a"] = {"versions": {}}
    assert nodes.changes() == [m.NodeJoined("b", 4)]


def test_a_newer_term_ends_the_greeting(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.views = [view("a")]
    monkeypatch.setattr(cluster_module.ray, "get_actor", lambda name, _: nodes._agent(name[-1]))
    nodes.hello["a"] = refused()
    with pytest.raises(FencedError):
        asyncio.run(nodes.cluster.hello(1))
    assert nodes.changes() == [FENCED]


def test_what_an_error_cut_short_comes_with_the_next_look(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.changes()
    nodes.views = [view("b")]
    drains = cluster_module.draining_nodes

    def fail() -> Any:
        raise OSError("the head is away")

    monkeypatch.setattr(cluster_module, "draining_nodes", fail)
    with pytest.raises(OSError, match="away"):
        nodes.changes()
    monkeypatch.setattr(cluster_module, "draining_nodes", drains)
    assert nodes.changes() == [m.NodeLost("a", "Ray reports it dead")]


def test_a_worker_is_killed_only_by_its_term(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.hello["a"] = {"workers": ["w1"]}
    nodes.changes()
    nodes.errors["kill"] = refused()
    with pytest.raises(FencedError, match="3 is older than 4"):
        asyncio.run(nodes.kill("w1"))
    nodes.errors["kill"] = TimeoutError()
    asyncio.run(nodes.kill("w1", newest=None))
    with pytest.raises(FencedError, match="the log holds a newer term than 1"):
        asyncio.run(nodes.kill("w1", newest=False))
    assert (nodes.killed, nodes.cluster.workers_on("a")) == ([], ["w1"])
    asyncio.run(nodes.kill("w1", newest=True))
    assert (len(nodes.killed), nodes.cluster.workers_on("a")) == (1, [])


def test_a_node_that_refuses_the_end_keeps_its_workers(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b")]
    nodes.hello = {"a": {"workers": ["w1"]}, "b": {"workers": ["w2"]}}
    nodes.changes()
    nodes.errors["close a"] = refused()
    with pytest.raises(FencedError):
        asyncio.run(nodes.cluster.close(1))
    assert len(nodes.killed) == 1, "the agent of the other node, which has ended its worker"
    assert not any("w1" in str(handle) for handle in nodes.killed)


def unmarked() -> RayError:
    """What Ray raises where an agent cannot mark its slots."""
    error = RayError("a traceback")
    error.cause = UnmarkedError("step 7 cannot be marked as kept: full")  # type: ignore[attr-defined]
    return error


def test_an_agent_that_could_not_mark_its_slots_is_named_and_not_killed(nodes: Nodes) -> None:
    nodes.views = [view("a"), view("b"), view("c")]
    nodes.hello = {"a": {"workers": ["w1"]}, "b": {"workers": ["w2"]}}
    nodes.changes()
    nodes.errors = {"close a": unmarked(), "close c": TimeoutError()}
    said = asyncio.run(nodes.cluster.close(1, m.Source("slots", 7, A), False))
    assert said == {"a": "step 7 cannot be marked as kept: full", "c": "TimeoutError"}
    assert len([handle for handle in nodes.killed if "agent" in str(handle)]) == 2, "of b and c"


def test_an_agent_refuses_an_older_terms_end(agent: Agent) -> None:
    agent.quarantine(2, "x", (1, 1, 5))
    with pytest.raises(FencedError):
        agent.close(1)
    assert not agent._closing.is_set()
    assert agent._folder.exists()
    agent.close(None)
    assert not agent._folder.exists(), "a person is fenced by no term"


def test_a_torn_spec_is_set_aside(agent: Agent) -> None:
    (agent._folder / "w1.spec").write_text(json.dumps(plain(SPEC_OF_B)))
    (agent._folder / "w2.spec").write_text(json.dumps(plain(SPEC_OF_B))[:40])
    assert agent._newest_spec() == SPEC_OF_B
    page_of(agent, "w2").put(start_ticks=1)
    bury(agent._folder, list, agent._newest_spec)
    assert not (agent._folder / "w2.spec").exists(), "no heartbeat waits for it for ever"


def test_a_nodes_traits_come_from_its_labels_and_its_agent() -> None:
    racked = JobConfig.model_validate({"cluster": {"failure_domain_label": "rack", "max_workers": 4}})
    hello = {"facts": NodeFacts([Card("T4", (7, 5), 15 * 2**30)], host_bytes=32 * 2**30)}
    here = NodeView("n", "host", 8.0, 2.0, 8.0, 2.0, {"rack": "r1"})
    on_host = traits_of(racked, here, hello, WorkerNeeds(1.0, 0.0))
    share = 8 * 2**30 - PROCESS_BYTES
    assert on_host == m.NodeTraits("n", share, "r1", False), "32 GiB for the 4 that may run there"
    on_gpu = m.NodeTraits("n", 15 * 2**30, "r1", True, "T4")
    assert traits_of(racked, here, hello, WorkerNeeds(1.0, 1.0)) == on_gpu
    bare = JobConfig.model_validate({"cluster": {"failure_domain_label": None}})
    assert traits_of(bare, here, {}, WorkerNeeds(1.0, 1.0)) == m.NodeTraits("n", 0, "", True)
    assert joined(on_host, 3) == m.NodeJoined("n", 3, "", share, domain="r1")


# --- reports -------------------------------------------------------------------------------------------


class Line:
    """A line to a coordinator that answers as it is told: True, False (an error), None (not yet)."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.answers: list[Any] = []

    def send(self, *words: Any) -> Future[None]:
        self.sent.append(words)
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        future: Future[None] = Future()
        if answer:
            future.set_result(None)
        elif answer is not None:
            future.set_exception(RayError("it died"))
        return future


def test_a_report_is_sent_until_it_is_acknowledged() -> None:
    line = Line()
    reports = Reports(line.send)
    line.answers = [ValueError("no such actor"), False, None, True]
    reports.tell(0.0, "a", "stalled", "w1")
    for now in (0.1, 0.2, 0.3, 0.2 + AGAIN_S - 0.1):
        reports.look(now)
    assert line.sent == [("stalled", "w1")] * 3, "the third has not been answered yet"
    reports.look(0.2 + AGAIN_S)
    for now in (10.0, 20.0):
        reports.look(now)
    assert line.sent == [("stalled", "w1")] * 4


def test_only_the_newest_report_of_its_kind_waits() -> None:
    line = Line()
    reports = Reports(line.send)
    line.answers = [False, False, False]
    reports.tell(0.0, "sealed", "sealed", 1)
    reports.tell(1.0, "sealed", "sealed", 2)
    reports.tell(1.0, "gone", "exited", "w1")
    reports.withdraw("gone")
    for now in (2.0, 3.0, 4.0):
        reports.look(now)
    assert line.sent == [("sealed", 1), ("sealed", 2), ("exited", "w1"), ("sealed", 2)]


def test_a_stall_that_is_over_is_told_no_longer(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    line.answers = [ValueError("no such actor")]
    agent._reports = agent._stalls._reports = Reports(line.send)
    monkeypatch.setattr(agent._stalls.cpu_use, "excuses", lambda *_: False)
    page = page_of(agent, "w1")
    page.phase("forward")
    page.put(phase_since_s=100.0, phase_limit_s=2.0)
    agent._look(103.0, heartbeat=False)
    page.phase("backward")
    page.put(phase_since_s=103.5, phase_limit_s=20.0)
    agent._look(104.0, heartbeat=False)
    agent._look(105.0, heartbeat=False)
    assert [words[0] for words in line.sent] == ["stalled", "stalled"], "at once again, then it was over"


def test_no_error_ends_an_agents_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    enough = threading.Event()

    def look(self: Agent, now: float, heartbeat: bool) -> None:
        looks.append(1)
        if len(looks) == 3:
            enough.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Agent, "_look", look)
    monkeypatch.setattr(agent_module, "WATCH_S", 0.01)
    config = job(metrics__enabled=False, snapshot__folder=str(tmp_path)).model_dump(mode="json")
    agent = Agent(config, "n1", "127.0.0.1")
    assert enough.wait(10)
    agent.close(None)


def test_a_node_goes_on_to_be_heard_while_large_slots_of_its_dead_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free one takes its file system seconds: the node was lost, and its living workers killed."""
    beats: list[str] = []
    begun, freed = threading.Event(), threading.Event()
    unlink = Path.unlink

    def slow(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".slot":
            begun.set()
            freed.wait(10)
        unlink(path, missing_ok)

    def tell(self: Agent, method: str, *arguments: Any) -> Future[None]:
        beats.append(method)
        heard: Future[None] = Future()
        heard.set_result(None)
        return heard

    monkeypatch.setattr(Path, "unlink", slow)
    monkeypatch.setattr(RendezvousServer, "keep", lambda self, now: None)
    monkeypatch.setattr(Agent, "_tell", tell)
    monkeypatch.setattr(agent_module, "WATCH_S", 0.01)
    config = job(metrics__enabled=False, elastic__heartbeat_s=0.05, snapshot__folder=str(tmp_path))
    agent = Agent(config.model_dump(mode="json"), "n1", "127.0.0.1")
    for index in range(2):
        SlotFile.create(agent._folder / f"dead.{index}.slot", 1).close()
    assert begun.wait(5)
    before, until = len(beats), time.monotonic() + 5
    while len(beats) < before + 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert beats[before:].count("heartbeats") >= 3
    assert len(list(agent._folder.glob("*.slot"))) == 2, "one at a time, and neither is gone"
    freed.set()
    while list(agent._folder.glob("*.slot")) and time.monotonic() < until:
        time.sleep(0.01)
    assert not list(agent._folder.glob("*.slot"))
    agent.close(None)


def test_a_worker_is_not_buried_before_its_exit_is_told(agent: Agent, told: Told) -> None:
    page_of(agent, "w1").put(start_ticks=1)
    page_of(agent, "w2")
    agent._burials.begin()
    agent._burials._thread.submit(lambda: None).result(5)
    assert (agent._folder / "w1.page").exists()
    agent._look(1.0, heartbeat=False)
    agent._burials.begin()
    agent._burials._thread.submit(lambda: None).result(5)
    assert told[0][:2] == ("worker_exited", "w1")
    assert sorted(path.name for path in agent._folder.glob("*.page")) == ["w2.page"]


def test_an_error_of_a_burial_is_told_and_ends_no_other(agent: Agent) -> None:
    def fail() -> Any:
        raise OSError("too many open files")

    burials = Burials(agent._folder, fail, agent._newest_spec)
    burials.begin()
    for _ in range(2):
        wait([burials._last], 5)
        with pytest.raises(OSError, match="open files"):
            burials.begin()
    burials.settle(5)
    burials.close()


def test_an_end_waits_only_so_long_for_a_burial(agent: Agent) -> None:
    hung = threading.Event()

    def wait_long() -> list[Any]:
        hung.wait(10)
        return []

    agent._burials = Burials(agent._folder, wait_long, agent._newest_spec)
    agent._burials.begin()
    began = time.monotonic()
    agent.close(None)
    assert time.monotonic() - began < 5.0
    assert not agent._folder.exists()
    hung.set()
