"""A coordinator's sign of life in storage, and what doors that see nothing else of a run make of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.term_claim import Launch
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, FencedError
from picotron_ray.runtime.driver.consent import COMMAND, PYTHON, Consent, Options
from picotron_ray.runtime.driver.elsewhere import WATCHED_S, await_silence, refuse_living
from picotron_ray.runtime.driver.storage_commands import collect_garbage
from picotron_ray.runtime.ray_cluster import local_ray, processes
from picotron_ray.runtime.run_storage import life_sign
from picotron_ray.runtime.run_storage.life_sign import (
    LIFE_S,
    SILENT_S,
    Life,
    LifeSign,
    Process,
    ProcessSpace,
    newest_life,
    remove_older,
    this_space,
)
from picotron_ray.runtime.run_storage.run_store import RunStore


def eventually(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


ELSEWHERE = ProcessSpace("far", "another boot", "pid:[1]")
GONE = Process(2**22 - 1, "17")
HERE = Process(os.getpid(), processes.started(os.getpid()))


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return load_job("tiny", ["name=night", f"storage.url={tmp_path}"])


@pytest.fixture
def storage(job: JobConfig) -> Storage:
    return open_storage(job.storage, job.name)


def life(**values: Any) -> Life:
    known = Life(1, 7, "", ELSEWHERE, GONE, GONE, "session_1", "10.0.0.7:6379", 4.0)
    return replace(known, **values)


def put(storage: Storage, term: int = 1, **values: Any) -> None:
    """A sign of a coordinator of another machine."""
    said: dict[str, Any] = {
        "term": term,
        "beat": 1,
        "ended": "",
        "machine": {"host": "far", "boot": "b", "namespace": "n"},
        "process": {"pid": 5, "started": "1"},
        "raylet": {"pid": 4, "started": "1"},
        "session": "session_1",
        "address": "10.0.0.7:6379",
    }
    storage.put(f"life/{term:06d}.json", json.dumps({**said, **values}).encode())


class Watch:
    """Looks at storage, as they come one after another; the last one stays."""

    options = COMMAND

    def __init__(self, *looks: Life | None) -> None:
        self.looks, self.paused_s, self.lines = list(looks), 0.0, list[str]()

    def look(self, _: Storage) -> Life | None:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def pause(self, seconds: float) -> None:
        self.paused_s += seconds
        last = self.looks[-1]
        if len(self.looks) == 1 and last is not None:
            self.looks = [replace(last, age_s=last.age_s + seconds)]

    def wait(self, storage: Storage, stopped: Callable[[], bool] = bool, asked: bool = False) -> int | None:
        user = Consent(asked, options=self.options, say=self.lines.append, stopped=stopped)
        return await_silence("night", storage, user, self.look, self.pause, lambda: self.paused_s)


# --- the sign ----------------------------------------------------------------------------------------------


def test_a_coordinator_signs_from_its_claim_to_its_end(job: JobConfig, storage: Storage) -> None:
    store = RunStore(job, lambda step: None)
    assert store.claim() == 1
    eventually(lambda: newest_life(storage) is not None)
    found = newest_life(storage)
    assert found is not None
    assert (found.term, found.machine, found.process) == (1, this_space(), HERE)
    assert found.age_s < SILENT_S, "by the storage's clock"
    assert found.seen_here() == "alive"
    store.finish({"status": "stopped"})
    assert newest_life(storage) is None, "nobody need wait for a run that has ended"
    store.close()


def test_a_run_that_storage_ended_says_so_where_it_can(job: JobConfig, storage: Storage) -> None:
    store = RunStore(job, lambda step: None)
    store.claim()
    eventually(lambda: newest_life(storage) is not None)
    store.close("storage")
    assert newest_life(storage) is None


def test_storage_that_hangs_keeps_no_run_from_its_end(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_sign, "END_S", 0.05)
    RunLog(storage).claim_term("far:5")
    stuck, tried = threading.Event(), threading.Event()

    def hanging(key: str, data: bytes) -> None:
        tried.set()
        stuck.wait(60.0)

    monkeypatch.setattr(storage, "put", hanging)
    sign = LifeSign(storage)
    sign.begin(1)
    assert tried.wait(60.0)
    ending = threading.Thread(target=sign.end, args=("finished",))
    ending.start()
    ending.join(30.0)
    assert not ending.is_alive()
    stuck.set()


def test_the_runs_own_ray_is_no_address_to_connect_to(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_sign, "_ray_context", lambda: Mock(gcs_address="10.0.0.7:6379"))
    RunLog(storage).claim_term("far:5")
    for owned, address in (("", "10.0.0.7:6379"), ("a file", "")):
        monkeypatch.setenv(local_ray.ENDED, owned)
        sign = LifeSign(storage)
        sign.begin(1)
        eventually(lambda address=address: (f := newest_life(storage)) is not None and f.address == address)
        sign.close()


def test_signs_go_on(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_sign, "LIFE_S", 0.01)
    RunLog(storage).claim_term("far:5")
    sign = LifeSign(storage)
    sign.begin(1)
    eventually(lambda: (found := newest_life(storage)) is not None and found.beat > 3)
    sign.close()


def test_a_storage_that_fails_keeps_no_sign_from_being_tried_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_sign, "LIFE_S", 0.01)
    RunLog(storage).claim_term("far:5")
    put_object, tries = storage.put, list[str]()

    def failing(key: str, data: bytes) -> None:
        tries.append(key)
        if len(tries) < 3:
            raise OSError("down")
        put_object(key, data)

    monkeypatch.setattr(storage, "put", failing)
    sign = LifeSign(storage)
    sign.begin(1)
    eventually(lambda: bool(list(storage.list("life/"))))
    sign.close()


def test_a_put_that_hangs_keeps_no_later_sign_back(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is given up after a minute at the earliest; a door elsewhere watches for half of one."""
    monkeypatch.setattr(life_sign, "LIFE_S", 0.01)
    RunLog(storage).claim_term("far:5")
    put_object, stuck, tries = storage.put, threading.Event(), list[str]()

    def hanging_once(key: str, data: bytes) -> None:
        tries.append(key)
        if len(tries) == 1:
            assert stuck.wait(60.0)
        put_object(key, data)

    monkeypatch.setattr(storage, "put", hanging_once)
    sign = LifeSign(storage)
    sign.begin(1)
    eventually(lambda: (found := newest_life(storage)) is not None and found.beat > 3)
    threading.Timer(0.2, stuck.set).start()
    sign.end("finished")
    assert newest_life(storage) is None, "the one that hung landed before the last"


def test_the_end_comes_while_a_sign_is_about_to_begin(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLog(storage).claim_term("far:5")
    start, about = threading.Thread.start, threading.Event()

    def late(thread: threading.Thread) -> None:
        if thread.name == "life-put":
            about.set()
            time.sleep(0.1)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    sign = LifeSign(storage)
    sign.begin(1)
    assert about.wait(60.0)
    sign.end("finished")
    time.sleep(0.2)
    assert newest_life(storage) is None, "the last sign is the end's"


def test_the_newest_term_alone_counts(storage: Storage) -> None:
    assert newest_life(storage) is None
    log = RunLog(storage)
    log.claim_term("far:5")
    put(storage)
    assert newest_life(storage) is not None
    log.claim_term("here:6:gc")
    assert newest_life(storage) is None, "a fenced coordinator signs for as long as it does not know"
    put(storage, 2)
    remove_older(storage, 2)
    assert [entry.key for entry in storage.list("life/")] == ["life/000002.json"]


@pytest.mark.parametrize("said", [b"{", b"{}", b'{"ended": ""}', b"[]"])
def test_a_damaged_sign_is_watched(storage: Storage, said: bytes) -> None:
    """One more field, of another version, would have the run taken over unasked."""
    RunLog(storage).claim_term("far:5")
    storage.put("life/000001.json", said)
    found = newest_life(storage)
    assert found is not None
    assert (found.where, found.seen_here()) == ("coordinator of term 1, process 5 on far", "")
    time.sleep(0.05)
    storage.put("life/000001.json", said)
    again = newest_life(storage)
    assert again is not None
    assert again.beat != found.beat, "it is put again and again: somebody lives"


def test_a_coordinator_that_has_yet_to_sign_lives(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its claim and its first sign a watcher of the one before took it for nobody."""
    log = RunLog(storage)
    log.claim_term("far:5")
    put(storage)
    first = newest_life(storage)
    log.claim_term("far:8")
    found = newest_life(storage)
    assert first is not None
    assert found is not None
    assert (found.term, found.beat, found.where) == (2, 0, "coordinator of term 2, process 8 on far")
    with pytest.raises(ConfigError, match="coordinator of term 2, process 8 on far was last heard"):
        Watch(first, found).wait(storage)
    monkeypatch.setattr(life_sign, "SILENT_S", -1.0)
    assert newest_life(storage) is None, "of an earlier version, which does not sign"
    monkeypatch.undo()
    log.claim_term("import")
    assert newest_life(storage) is None


def test_processes_of_this_space_show_life_and_death() -> None:
    here = this_space()
    assert life().seen_here() == "", "ids of another machine say nothing"
    assert life(machine=here).seen_here() == "dead"
    assert life(machine=here, process=HERE).seen_here() == "alive"
    assert life(machine=here, process=replace(HERE, started="1")).seen_here() == "dead", "the id is another's"
    assert life(machine=here, raylet=HERE).seen_here() == "", "it starts the coordinator again"


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = processes.started(child.pid)
    assert processes.lives(child.pid, began)
    child.kill()
    eventually(lambda: not processes.lives(child.pid, began))
    child.communicate()
    assert not processes.lives(child.pid, began)


def test_the_ray_that_has_no_such_coordinator_proves_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_sign, "_ray_session", lambda: "session_1")
    assert life().seen_here() == "dead"
    assert life(session="session_2").seen_here() == ""
    monkeypatch.setattr(life_sign, "_ray_session", str)
    assert life(session="").seen_here() == "", "no Ray is no proof"


# --- a launch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [None, life(machine=this_space())],
    ids=["none", "killed here"],
)
def test_a_launch_goes_on_at_once_where_nobody_lives(storage: Storage, found: Life | None) -> None:
    watch = Watch(found)
    watch.wait(storage)
    assert (watch.paused_s, watch.lines) == (0.0, [])


@pytest.mark.parametrize(("options", "option"), [(COMMAND, "--take-over"), (PYTHON, "take_over=True")])
def test_a_launch_is_refused_by_the_next_sign(storage: Storage, options: Options, option: str) -> None:
    watch = Watch(life(), life(age_s=6.0), life(beat=8, age_s=0.0))
    watch.options = options
    with pytest.raises(ConfigError) as refused:
        watch.wait(storage)
    said = str(refused.value)
    assert "process 4194303 on far, in the Ray at 10.0.0.7:6379 was last heard 2 s ago" in said
    assert all(word in said for word in ("RAY_ADDRESS=10.0.0.7:6379", f"; {option} ends it"))
    assert "\n" not in said
    assert watch.paused_s < LIFE_S


def test_a_coordinator_that_ray_starts_again_refuses_a_launch(storage: Storage) -> None:
    with pytest.raises(ConfigError, match="coordinator of term 2"):
        Watch(life(age_s=90.0), life(term=2, beat=1, age_s=0.0)).wait(storage)


def test_a_launch_counts_down_to_a_silent_coordinators_death(storage: Storage) -> None:
    watch = Watch(life(age_s=85.0))
    watch.wait(storage)
    assert watch.paused_s == pytest.approx(SILENT_S - 85.0)
    left = [line.partition("another ")[2].split()[0] for line in watch.lines]
    assert left == ["35", "25", "15", "5"], "a line now and then"


@pytest.mark.parametrize("age_s", [SILENT_S, 1e6])
def test_an_old_sign_is_watched_all_the_same(storage: Storage, age_s: float) -> None:
    """Storage was away until now, or has the clock of whoever writes."""
    watch = Watch(life(age_s=age_s))
    watch.wait(storage)
    assert watch.paused_s == pytest.approx(WATCHED_S)
    with pytest.raises(ConfigError, match="goes on elsewhere"):
        Watch(life(age_s=age_s), life(age_s=age_s, beat=8)).wait(storage)


def test_a_sign_from_the_future_is_waited_for_no_longer_than_any(storage: Storage) -> None:
    watch = Watch(life(age_s=0.0))
    watch.pause = lambda seconds: setattr(watch, "paused_s", watch.paused_s + seconds)  # type: ignore[method-assign]
    watch.wait(storage)
    assert watch.paused_s == pytest.approx(SILENT_S), "its age stays 0: the writer's clock is ahead"


def test_a_run_that_ends_meanwhile_is_no_hindrance(storage: Storage) -> None:
    watch = Watch(life(), None)
    watch.wait(storage)
    assert watch.paused_s > 0


def test_a_living_process_of_this_space_refuses_at_once(storage: Storage) -> None:
    watch = Watch(life(machine=this_space(), process=HERE, address="127.0.0.1:6379"))
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on .*XDG_STATE_HOME"):
        watch.wait(storage)
    assert watch.paused_s == 0


def test_who_takes_over_or_leaves_does_not_wait(storage: Storage) -> None:
    living = life(machine=this_space(), process=HERE)
    Watch(living).wait(storage, asked=True)
    watch = Watch(life())
    watch.wait(storage, stopped=lambda: True)
    assert watch.paused_s == 0


# --- collection of garbage ---------------------------------------------------------------------------------


def test_garbage_of_a_run_that_lives_elsewhere_is_not_collected(job: JobConfig, storage: Storage) -> None:
    log = RunLog(storage)
    log.claim_term("far:5")
    put(storage)
    with pytest.raises(ConfigError, match=r"process 5 on far, .* last heard 0 s ago .*RAY_ADDRESS=.*--force"):
        collect_garbage(job)
    log.confirm()  # else it was fenced
    assert collect_garbage(job, force=True)["deleted"] == 0
    assert collect_garbage(job)["deleted"] == 0, "the coordinator is fenced, nothing lives"


def test_garbage_of_a_dead_or_ended_run_is_collected(
    job: JobConfig, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLog(storage).claim_term("far:5")
    put(storage, ended="finished")
    assert collect_garbage(job)["deleted"] == 0
    term = RunLog(storage).claim_term("far:6")
    put(storage, term)
    with pytest.raises(ConfigError):
        refuse_living(job.name, storage)
    found = newest_life(storage)
    assert found is not None
    old = replace(found, age_s=SILENT_S)
    pauses: list[float] = []
    refuse_living(job.name, storage, lambda _: old, pauses.append)
    assert pauses == [WATCHED_S], "storage that was away for long kept its signs from all who looked"
    signs = iter((old, replace(old, beat=old.beat + 1, age_s=2.0)))
    with pytest.raises(ConfigError, match="last heard 2 s ago; stop it first"):
        refuse_living(job.name, storage, lambda _: next(signs), pauses.append)


# --- two doors at once -------------------------------------------------------------------------------------


def store_of(job: JobConfig, launch: Launch) -> RunStore:
    return RunStore(job, lambda step: None, launch=launch)


def test_of_two_launches_that_saw_the_same_coordinator_dead_the_first_has_the_run(
    job: JobConfig, storage: Storage
) -> None:
    """The second one's claim would fence the first, which trains by then."""
    RunLog(storage).claim_term("far:5")
    put(storage)
    doors = [Watch(life(age_s=500.0), life(age_s=500.0)) for _ in range(2)]
    follows = [door.wait(storage) for door in doors]
    assert follows == [1, 1]
    first, second = (store_of(job, Launch(name, follows[0])) for name in ("a", "b"))
    assert first.claim() == 2
    with pytest.raises(FencedError, match=r"another launch was begun first: its coordinator .* term 2"):
        second.claim()
    assert first.is_newest()
    first.close()
    second.close()


def test_two_first_launches_at_once_are_one(job: JobConfig, storage: Storage) -> None:
    follows = Watch(None).wait(storage)
    assert follows == 0
    first, second = (store_of(job, Launch(name, follows)) for name in ("a", "b"))
    assert first.claim() == 1
    with pytest.raises(FencedError):
        second.claim()
    first.close()


def test_a_coordinator_that_ray_starts_again_fences_no_launch_that_took_over(
    job: JobConfig, storage: Storage
) -> None:
    first = store_of(job, Launch("a", 0))
    assert first.claim() == 1
    again = store_of(job, Launch("a", 0))
    assert again.claim() == 2, "its own terms, at each restart"
    assert store_of(job, Launch("b", Watch(life()).wait(storage, asked=True))).claim() == 3
    with pytest.raises(FencedError, match=r"another launch has taken the run over: .* term 3") as refused:
        store_of(job, Launch("a", 0)).claim()
    assert refused.value.owner


def test_what_commands_claimed_keeps_no_launch_from_its_term(job: JobConfig, storage: Storage) -> None:
    RunLog(storage).claim_term("here:6:gc")
    assert store_of(job, Launch("a", 0)).claim() == 2


def test_a_term_that_ended_while_its_sign_was_watched_is_followed(storage: Storage) -> None:
    RunLog(storage).claim_term("far:5")
    assert Watch(life(term=4), None).wait(storage) == 4, "claimed after the log was read"
    assert Watch(life(), replace(life(), term=2, machine=this_space())).wait(storage) == 2
