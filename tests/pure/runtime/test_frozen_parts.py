"""A disk, a driver or a store that never answers holds nobody up but those who want what it has."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.observability.logs.pages import START
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime import log_keeper, node_logs
from picotron_ray.runtime.coordinator import log_service
from picotron_ray.runtime.coordinator.log_service import LastLines
from picotron_ray.runtime.log_keeper import LogKeeper
from picotron_ray.runtime.node_agent import machine_watch
from picotron_ray.runtime.node_agent.machine_watch import MachineWatch, watched
from picotron_ray.runtime.worker.tools import window
from picotron_ray.runtime.worker.tools.window import RecordedSteps, WindowedTool


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def thawed() -> Iterator[threading.Event]:
    """Set at the end, so that threads that wait for it end."""
    event = threading.Event()
    yield event
    event.set()


class FrozenMachine:
    """Machine whose disks and GPUs answer from `thawed` on."""

    def __init__(self, thawed: threading.Event) -> None:
        self._thawed = thawed

    def utilizations(self) -> Mapping[str, float]:
        self._thawed.wait()
        return {"gpu": 0.5}

    def health(self) -> dict[str, float]:
        self._thawed.wait()
        return {"cpu": 0.25}


def test_heartbeats_do_not_wait_for_the_machine(tmp_path: Path, thawed: threading.Event) -> None:
    """A shared folder of checkpoints that hung silenced all agents within one interval."""
    telemetry = watched(tmp_path, 0.001, FrozenMachine(thawed))
    beat = [{"worker": "w0"}]
    assert [telemetry.added(beat, float(at)) for at in range(3)] == [beat] * 3


def test_what_the_machine_tells_arrives_and_what_is_old_does_not(
    monkeypatch: pytest.MonkeyPatch, thawed: threading.Event
) -> None:
    watch = MachineWatch(FrozenMachine(thawed), 0.001)
    assert (watch.utilizations(), watch.health()) == ({}, {})
    thawed.set()
    until(lambda: (watch.utilizations(), watch.health()) == ({"gpu": 0.5}, {"cpu": 0.25}))
    monkeypatch.setattr(machine_watch, "OLD_S", -10.0)
    assert (watch.utilizations(), watch.health()) == ({}, {})


def test_nobody_looks_at_the_machine_of_an_agent_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_watch, "LOOK_S", 0.01)
    calm = threading.Event()
    calm.set()
    others = set(threading.enumerate())  # other tests leave watches to the collector
    watch = MachineWatch(FrozenMachine(calm), 0.01)
    begun = [each for each in threading.enumerate() if each.name == "machine" and each not in others]
    assert len(begun) == 2
    del watch
    gc.collect()
    until(lambda: not any(each.is_alive() for each in begun))


# --- logs --------------------------------------------------------------------------------------------


def test_readers_and_the_end_do_not_wait_for_a_keeper_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thawed: threading.Event
) -> None:
    """Each poll of a follower kept one of the agent's threads, until it answered no call at all."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(node_logs, "WAIT_S", 0.01)
    monkeypatch.setattr(log_keeper, "CLOSE_S", 0.01)
    monkeypatch.setattr(log_keeper, "POLL_S", 0.01)
    looking: list[LogKeeper] = []  # another test's keeper may live on in this process, and look first

    def frozen(self: LogKeeper, now_s: float) -> None:
        looking.append(self)
        thawed.wait()

    monkeypatch.setattr(LogKeeper, "_look", frozen)
    monkeypatch.setattr(node_logs, "open_storage", lambda *known: None)
    logs = node_logs.NodeLogs(SimpleNamespace(name="night", storage=None), "n" * 20, "agent")  # type: ignore[arg-type]
    until(lambda: logs._keeper in looking)
    assert [logs.read(Query(), START, 100).entries for _ in range(4)] == [()] * 4
    monkeypatch.setattr(node_logs, "read_page", lambda *known: thawed.wait())
    stuck = [threading.Thread(target=logs.read, args=(Query(), START, 100), daemon=True) for _ in range(2)]
    for thread in stuck:
        thread.start()
    until(lambda: not logs._readers.acquire(blocking=False) or bool(logs._readers.release()))
    with pytest.raises(TimeoutError, match="the disk that has its lines does not answer"):
        logs.read(Query(), START, 100)  # two wait for the disk, the third is told
    logs._keeper.close()


def last_lines(monkeypatch: pytest.MonkeyPatch, storage: Any) -> tuple[LastLines, list[str], list[Any]]:
    sent: list[str] = []
    tasks: list[Any] = []

    async def call_agent(node: str, what: str, worker: str, key: str, **known: float) -> bool:
        sent.append(key)
        return True

    cluster = SimpleNamespace(node_of=lambda worker: "n", gone=lambda worker: None, call_agent=call_agent)
    monkeypatch.setattr(log_service, "open_storage", lambda *known: storage)
    job = SimpleNamespace(storage=None, name="night")
    lines = LastLines(
        job, cluster, lambda *words: None, lambda work: tasks.append(asyncio.ensure_future(work))
    )  # type: ignore[arg-type]
    return lines, sent, tasks


def test_workers_that_die_together_have_a_place_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wrote over each other: eight deaths, one object."""

    async def run() -> list[str]:
        lines, sent, tasks = last_lines(monkeypatch, SimpleNamespace(list=lambda prefix: []))
        for number in range(8):
            lines.gone(f"w{number}")
        await asyncio.gather(*tasks)
        return sent

    sent = asyncio.run(run())
    assert len(set(sent)) == len(sent) == 8


def test_deaths_while_storage_hangs_leave_the_loops_threads_alone(
    monkeypatch: pytest.MonkeyPatch, thawed: threading.Event
) -> None:
    monkeypatch.setattr(log_service, "SLOTS_S", 0.05)

    async def run() -> str:
        frozen = SimpleNamespace(list=lambda prefix: [thawed.wait()][:0])
        lines, sent, tasks = last_lines(monkeypatch, frozen)
        for number in range(8):
            lines.gone(f"w{number}")
        await asyncio.gather(*tasks)
        assert sent == []
        names = {each.name.rpartition("_")[0] for each in threading.enumerate()}
        assert "asyncio" not in names, "the loop's own threads are free"
        return await asyncio.to_thread(lambda: "free")

    assert asyncio.run(run()) == "free"


# --- recordings --------------------------------------------------------------------------------------


class Recorded:
    """Recording that says on which thread it was stopped; saving waits."""

    def __init__(self, saved: threading.Event) -> None:
        self._saved, self.stopped_on = saved, list[str]()

    def prepare(self) -> None: ...

    def start(self) -> None: ...

    def begin(self, step: int) -> None: ...

    def end(self, step: int) -> None: ...

    def stop(self) -> None:
        self.stopped_on.append(threading.current_thread().name)

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        self._saved.wait()
        return {"late": True}


def tool_of(recorded: Recorded, path: Path) -> WindowedTool:
    tool = WindowedTool("k", RecordedSteps(0, 0, 3), recorded, path, 100)
    tool.go()
    tool.begin(1)
    return tool


def test_a_recording_that_is_dropped_ends_on_the_thread_that_trains(
    tmp_path: Path, thawed: threading.Event
) -> None:
    """Hooks and profilers stayed on in training: they belong to the thread that they were set on."""
    recorded = Recorded(thawed)
    tool = tool_of(recorded, tmp_path / "t")
    order = threading.Thread(target=tool.unwanted, args=("it was dropped",), name="order")
    order.start()
    order.join()
    assert (tool.state, recorded.stopped_on) == ("running", [])
    tool.end(1)
    assert (tool.state, recorded.stopped_on) == ("failed", [threading.current_thread().name])
    assert tool.plain()["text"] == "it was dropped"


def test_ranks_are_not_held_for_ever_by_a_recording_that_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thawed: threading.Event
) -> None:
    recorded = Recorded(thawed)
    tool = tool_of(recorded, tmp_path / "t")
    for step in (1, 2, 3):
        tool.end(step)
        tool.begin(step + 1)
    tool.save()
    assert tool.holds
    monkeypatch.setattr(window, "SAVE_S", 0.0)
    assert not tool.holds
    assert "was not saved within" in tool.plain()["text"]
    thawed.set()
    until(lambda: not any(each.name == "recording" for each in threading.enumerate()))
    assert tool.state == "failed", "what comes too late changes nothing"


def test_a_recording_that_is_being_saved_can_be_dropped(tmp_path: Path, thawed: threading.Event) -> None:
    tool = tool_of(Recorded(thawed), tmp_path / "t")
    for step in (1, 2, 3):
        tool.end(step)
        tool.begin(step + 1)
    tool.save()
    tool.unwanted("it was dropped")
    assert (tool.state, tool.holds) == ("failed", False)
