"""A driver beside fakes: what it checks, starts, follows and takes down, and with which code it exits."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.runtime.driver import driver, launch_mark, resolve_job
from picotron_ray.runtime.driver.follow_run import DETACHED, POLL_S, Signals, StoppedEarlyError
from picotron_ray.runtime.driver.resolve_job import ResolvedJob, ResolveStep
from picotron_ray.runtime.ray_cluster import supervisor
from tests.support.runs.coordinator_world import job

JOB = job(name="night")
ASKED = ResolvedJob(JOB, relative_url="runs")
CHECKED = job(name="night", steps=77)
DATA: Any = SimpleNamespace(fingerprint="aa")
LOCAL: Any = SimpleNamespace(run="night", alive=True)
SUMMARY = {"run": "night", "status": "stopped", "steps": 3, "wall_s": 1.0}


class Bench:
    """The parts of a driver, which note what they are told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.patch = patch
        self.out = io.StringIO()
        self.console = Console(file=self.out, width=200)
        self.signals = Signals()
        self.ray = self.module("ray", kill=None, remote=None)
        self.note_of("take_down")
        self.note_of("check_machine", SimpleNamespace(notes=["too small"], job=CHECKED, follows=4))

    def note_of(self, name: str, answer: Any = None, where: Any = driver) -> None:
        def noted(*words: Any, **named: Any) -> Any:
            self.told.append((name, *words, *named.values()))
            return answer

        self.patch.setattr(where, name, noted)

    def module(self, name: str, **values: Any) -> Any:
        """A module that stands in for one that would import Ray or torch."""
        made = ModuleType(name)
        vars(made).update(values)
        self.patch.setitem(sys.modules, name, made)
        return made

    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Bench(monkeypatch)


def drive(bench: Bench, final: Any, detach: bool = False) -> Any:
    bench.note_of("_connected", LOCAL)
    bench.note_of("_coordinator", ("handle", True))
    bench.patch.setattr(driver, "follow", lambda *given, local, ended, attached: final)
    return driver._drive(ASKED, detach, bench.console)


def test_a_run_is_followed_to_its_end_and_its_ray_taken_down(bench: Bench) -> None:
    assert drive(bench, {"summary": SUMMARY, "exit_code": 130}) == (130, SUMMARY)
    assert bench.told[-1] == ("take_down", LOCAL, "handle")
    assert bench.lines()[0] == "run night stopped at step 3 in 1.0 s"
    bench.told.clear()
    assert drive(bench, {"summary": SUMMARY, "exit_code": 3, "gone": True}) == (3, SUMMARY)
    assert "take_down" not in [words[0] for words in bench.told], "a Ray that is gone is asked for nothing"


@pytest.mark.parametrize(
    ("detach", "code", "line"),
    [
        (True, 0, "run night goes on; `picotron-ray status night` shows it"),
        (False, DETACHED, "left running; `picotron-ray stop night` stops it"),
    ],
)
def test_a_run_that_is_left_goes_on(bench: Bench, detach: bool, code: int, line: str) -> None:
    assert drive(bench, None, detach) == (code, None)
    assert bench.lines() == [line]
    assert [words[0] for words in bench.told] == ["_connected", "_coordinator"]


def test_a_launch_is_marked_until_its_run_has_a_coordinator(bench: Bench) -> None:
    marks: list[int | None] = []

    def mark(*_: object) -> Any:
        marks.append(launch_mark.launcher("night"))
        return ("handle", False)

    bench.patch.setattr(driver, "resolve", lambda words, steps: mark() and words)
    bench.patch.setattr(driver, "_coordinator", mark)
    bench.patch.setattr(driver, "follow", lambda *_, **__: mark() and None)
    bench.note_of("_connected", LOCAL)
    assert driver.drive("tiny", ["name=night"], console=bench.console) == DETACHED
    assert marks == [os.getpid(), os.getpid(), None]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_summary_is_the_last_line_where_json_was_asked_for(
    bench: Bench, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SimpleNamespace(id="job-1")
    bench.patch.setattr(driver, "submission", SimpleNamespace(current=lambda: found))
    bench.patch.setattr(driver, "resolve_words", lambda *words: ASKED)
    bench.patch.setattr(driver, "resolve", lambda words, steps: words)
    bench.patch.setattr(driver, "_drive", lambda *words: (3, SUMMARY))
    assert driver.drive("x", as_json=as_json, console=bench.console) == 3
    assert bench.lines() == ["Ray job job-1: the driver exits with code 3"]
    printed = capsys.readouterr().out.splitlines()
    assert printed == ([json.dumps(SUMMARY)] if as_json else [])
    bench.patch.setattr(driver, "_drive", lambda *words: (1, None))
    bench.patch.setattr(driver, "submission", SimpleNamespace(current=lambda: None))
    assert driver.drive("x", as_json=as_json, console=bench.console) == 1
    assert (len(bench.lines()), capsys.readouterr().out) == (1, "")


@pytest.mark.parametrize(
    ("address", "found", "checked"),
    [
        ("", None, True),
        ("", SimpleNamespace(alive=False), True),
        ("", LOCAL, False),
        ("h:1", None, False),
    ],
)
def test_a_ray_is_checked_before_it_is_started(bench: Bench, address: str, found: Any, checked: bool) -> None:
    bench.patch.setenv("RAY_ADDRESS", address)
    bench.patch.setattr(resolve_job.local_ray, "locked", lambda run: contextlib.nullcontext())
    bench.patch.setattr(resolve_job.local_ray, "find", lambda run: found)
    bench.note_of("clear", where=resolve_job.cleanup)
    bench.note_of("connect", "ray", where=driver.connect)
    bench.patch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: 7.0))

    def machine(at: ResolvedJob) -> ResolvedJob:
        bench.told.append(("machine", at.job, at.owns_ray))
        return replace(at, job=CHECKED).noting("too small")

    bench.patch.setattr(resolve_job, "ON_THE_MACHINE", (ResolveStep("machine", machine),))
    runs = CHECKED if checked else JOB
    local, asked = driver.prepare(JOB, bench.console)
    assert (local, asked.job) == ("ray", runs)
    steps = [("clear", JOB, found), ("machine", JOB, True)] if checked else []
    *before, (name, job, *_) = bench.told
    assert [*before, (name, job)] == [*steps, ("connect", runs)]
    started = "run night: starting a Ray on this machine; checkpoints go to ./runs"
    up = "run night: Ray is up (0.0 s); starting its coordinator"
    assert bench.lines() == (["note: too small", started, up] if checked else [])


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_goes_on_is_attached_to(bench: Bench, goes_on: bool) -> None:
    bench.note_of("_going_on", "handle" if goes_on else None)
    bench.note_of("_start", "fresh")
    bench.note_of("_differences", ["other steps"])
    found = driver._coordinator(ASKED, LOCAL, bench.console, bench.signals)
    assert found == ("handle" if goes_on else "fresh", goes_on)
    attached = ["attached to run night, which goes on with the config it has"] if goes_on else []
    assert bench.lines() == [*attached, "note: other steps"]
    assert ("_start" in [words[0] for words in bench.told]) == (not goes_on)


@pytest.mark.parametrize("local", [None, LOCAL])
def test_a_start_waits_for_the_first_answer(bench: Bench, local: Any) -> None:
    answers: list[Any] = [None, None, {}]
    asked: list[Any] = []
    bench.patch.setattr(driver, "poll", lambda *words: asked.append(words) or answers.pop(0))
    bench.note_of("ensure_coordinator", ("fresh", False))
    bench.note_of("begin", where=driver.local_ray)
    assert driver._start(ASKED, local, bench.console, bench.signals) == "fresh"
    assert asked == [("fresh", driver.ALL_SEEN, 1.0)] * 3
    user = bench.told[0][-1] if local is None else None
    assert user is None or not user.stopped()
    checked = [("check_machine", JOB, False, "runs", user)] if local is None else []
    runs = JOB if local else CHECKED
    assert bench.told == [
        *checked,
        ("ensure_coordinator", runs, local is not None, None, None if local else 4),
        *([("begin", LOCAL)] if local else []),
    ]
    answers[:] = [None]
    bench.patch.setattr(driver, "START_S", 0.0)
    assert driver._start(ASKED, local, bench.console, bench.signals) == "fresh"
    assert len(asked) == 3, "not for ever"


def test_a_stop_before_the_start_takes_the_ray_down(bench: Bench) -> None:
    bench.signals.asked = 1
    with pytest.raises(StoppedEarlyError, match="run night: stopped by request before anything was started"):
        driver._start(ASKED, LOCAL, bench.console, bench.signals)
    assert bench.told == [("take_down", LOCAL)]


def test_a_coordinator_that_has_ended_is_waited_for_and_then_killed(bench: Bench) -> None:
    now, naps = [100.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        naps.append(seconds)

    alive: list[Any] = ["old"]
    bench.patch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    bench.patch.setattr(driver, "find_coordinator", lambda run: alive[0] if alive else None)
    bench.patch.setattr(bench.ray, "kill", lambda found: alive.clear())
    statuses: list[Any] = [None]
    bench.patch.setattr(driver, "poll", lambda found, since: statuses[0])
    assert driver._going_on("night", None) == "old", "it does not answer"
    statuses[0] = {"done": False}
    assert driver._going_on("night", None) == "old"
    statuses[0] = {"done": True}
    assert driver._going_on("night", LOCAL) == "old", "it has a result to tell"
    assert naps == []
    assert driver._going_on("night", None) is None
    waited_s = supervisor.LINGER_S + POLL_S
    assert waited_s < now[0] - 100.0 <= waited_s + 2 * POLL_S
    assert set(naps) == {POLL_S}
    assert driver._going_on("night", None) is None


def test_differences_to_a_run_that_goes_on_are_told(bench: Bench) -> None:
    bench.patch.setattr(driver, "ask", lambda coordinator, what: None)
    assert driver._differences(JOB, "handle") == []
    bench.patch.setattr(driver, "ask", lambda coordinator, what: {"theirs": what})
    bench.patch.setattr(driver, "resolve", lambda resolved, stages: resolved)
    bench.note_of("check_resume", ["steps: 5 instead of 100"])
    assert driver._differences(JOB, "handle") == [
        "steps: 5 instead of 100, once the run is stopped and launched again"
    ]
    assert bench.told == [("check_resume", {"theirs": "config"}, JOB)]


def test_one_coordinator_is_started_on_the_head_and_lives_without_its_driver(
    bench: Bench, tmp_path: Path
) -> None:
    bench.patch.setattr(driver, "find_coordinator", lambda run: "there")
    assert driver.ensure_coordinator(JOB) == ("there", True)
    bench.patch.setattr(driver, "find_coordinator", lambda run: None)
    bench.patch.setattr(
        driver,
        "resolve",
        lambda resolved, stages: SimpleNamespace(
            job=JOB, start="origin", notes=("n",), slot_bytes=7, data=DATA
        ),
    )
    bench.patch.setattr(driver, "event_folder", lambda run: tmp_path)
    bench.module("picotron_ray.runtime.coordinator.actor", Coordinator="actor")
    bench.module("picotron_ray.runtime.ray_cluster.placement", ON_HEAD={"node:head": 0.001})
    seen: dict[str, Any] = {}

    def options(**named: Any) -> Any:
        seen.update(named)
        return SimpleNamespace(remote=lambda *words: words)

    bench.patch.setattr(bench.ray, "remote", lambda actor: SimpleNamespace(options=options))
    submitted: Any = SimpleNamespace(plain=lambda: {"submission_id": "x"})
    (config, settings), attached = driver.ensure_coordinator(JOB, True, submitted, {"pid": 1}, 4)
    assert (config, attached) == (JOB.model_dump(mode="json"), False)
    assert len(settings.pop("launch")) == 32
    assert settings.pop("launched_s") > 0
    assert settings == {
        "event_folder": str(tmp_path), "owns_ray": True, "origin": "origin",
        "submission": {"submission_id": "x"}, "tied_to": {"pid": 1}, "notes": ["n"], "slot_bytes": 7,
        "data": "aa", "follows": 4,
    }  # fmt: skip
    known = ("lifetime", "get_if_exists", "num_cpus", "max_restarts", "max_task_retries")
    assert [seen[name] for name in known] == ["detached", True, 0, -1, 0]
    assert seen["resources"] == {"node:head": 0.001}
    (_, plain), _ = driver.ensure_coordinator(JOB)
    assert (plain["owns_ray"], plain["submission"], plain["tied_to"]) == (False, None, None)
