"""Requests to a run that is being launched, or has ended: real marks and event logs, no Ray."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.replay import header_line, seal
from picotron_ray.errors import ConfigError, StorageError
from picotron_ray.runtime.coordinator.event_log import files
from picotron_ray.runtime.driver import control, ended_run, follow_run, launch_mark
from picotron_ray.runtime.driver.console import status_lines
from picotron_ray.runtime.ray_cluster import kept_slots
from picotron_ray.runtime.ray_cluster.names import event_folder, run_folder
from tests.support.faults.full_folder import run_on_small_disk
from tests.support.runs.coordinator_world import job

HOLDER = """
import sys
from picotron_ray.runtime.driver import launch_mark
with launch_mark.held("night"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(follow_run, "POLL_S", 0.01)
    monkeypatch.setattr(follow_run, "disconnect", lambda: None)


@pytest.fixture
def launch() -> Iterator[subprocess.Popen[str]]:
    """Another process that launches ``night`` until it hears a line."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_last_launch_takes_its_mark_away(launch: subprocess.Popen[str]) -> None:
    with launch_mark.held("night"):
        pass
    assert launch_mark.launcher("night") is not None, "the other one goes on"
    assert launch.stdin is not None
    launch.stdin.write("\n")
    launch.stdin.flush()
    launch.wait(30)
    assert not launch_mark.mark_file("night").exists()
    assert not launch_mark.state_folder().exists(), "nothing else was kept there"


def test_a_full_disk_takes_a_mark_without_words(tmp_path: Path) -> None:
    code = """
import os
os.environ["XDG_STATE_HOME"] = str(folder)
from picotron_ray.runtime.driver import launch_mark
launch_mark.state_folder().mkdir()
fill(folder)
with launch_mark.held("night"):
    print(launch_mark.launcher("night") is not None)
"""
    assert run_on_small_disk(tmp_path, code) == "True\n"


def stop(now: bool = False) -> tuple[Any, str]:
    """What a stop of ``night`` returns or raises, and what it prints."""
    console = Console(file=io.StringIO(), width=1000)
    try:
        found: Any = control.stop("night", now, console)
    except ConfigError as error:
        found = error
    return found, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_launch_is_seen_while_it_lives_and_a_killed_one_means_nothing(
    launch: subprocess.Popen[str],
) -> None:
    assert launch_mark.launcher("night") == launch.pid
    assert launch_mark.launcher("nightly") is None
    with launch_mark.held("night"):  # two launches at once
        launch.send_signal(signal.SIGKILL)
        launch.wait()
        assert launch_mark.launcher("night") == os.getpid()
    assert launch_mark.launcher("night") is None


def test_the_status_of_a_run_that_is_being_launched_says_so(launch: subprocess.Popen[str]) -> None:
    seen = control.status("night")
    assert (seen["state"], seen["launcher"]) == ("starting", launch.pid)
    [line] = status_lines(seen)
    assert line.startswith("[starting] run night is being launched by process")
    with pytest.raises(ConfigError, match="is being launched and has no coordinator yet"):
        control.checkpoint_now("night", 1.0)


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_waits_for_a_launch_and_then_finds_what_it_started(
    now: bool, launch: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "WAIT_LINE_S", 0.05)
    asked: list[bool] = []

    def connect(run: str) -> Any:
        asked.append(launch_mark.launcher(run) is None)
        raise ConfigError("none yet")

    monkeypatch.setattr(control, "connect_to_run", connect)
    assert launch.stdin is not None
    threading.Timer(0.4, lambda: launch.stdin.write("go on\n") and launch.stdin.flush()).start()  # type: ignore[union-attr]
    _, said = stop(now)
    lines = said.splitlines()
    assert lines[0].startswith(f"run night is being launched by process {launch.pid}: waiting for its")
    assert lines[1].startswith("waiting for the launch of night (")
    assert asked[0] is False, "a launch that only attaches would not be waited for"
    assert all(asked[1:])
    assert asked[1:], "then the run is looked for"


def test_a_launch_that_takes_too_long_is_left_alone(
    launch: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "START_WAIT_S", 0.05)
    with pytest.raises(follow_run.LostRunError, match="had no coordinator within"):
        stop()
    assert launch.poll() is None


# --- runs that have ended -----------------------------------------------------------------------------------


def ended(folder: Path, term: int, summary: dict[str, Any] | None) -> JobConfig:
    """Event log of ``term`` as a coordinator leaves it, and a summary in storage."""
    found = job(name="night", storage={"url": str(folder)})
    logs = event_folder("night")
    logs.mkdir(parents=True, exist_ok=True)
    files.log_file(logs, term, 0).write_text(seal(header_line(found, {})) + "\n")
    if summary is not None:
        open_storage(found.storage, "night").put("summary.json", json.dumps(summary).encode())
    return found


def summary(term: int, status: str) -> dict[str, Any]:
    return {"run": "night", "term": term, "status": status, "steps": 8, "wall_s": 1.0, "detail": ""}


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_an_ended_run_is_told_from_its_summary_and_a_second_stop_is_no_error(
    status: str, tmp_path: Path
) -> None:
    ended(tmp_path, 1, summary(1, status))
    seen = control.status("night")
    assert (seen["state"], seen["summary"]["steps"]) == (status, 8)
    assert status_lines(seen)[:2] == [
        "run night has ended already",
        f"run night {status} at step 8 in 1.0 s",
    ]
    for now in (False, True):
        assert stop(now) == ((0, summary(1, status)), "run night has ended already\n")


def test_a_summary_of_an_earlier_launch_is_not_taken_for_the_end_of_one_that_was_cut_off(
    tmp_path: Path,
) -> None:
    ended(tmp_path, 1, summary(1, "finished"))
    ended(tmp_path, 2, None)
    seen = control.status("night")
    assert (seen["state"], seen["summary"], seen["committed"]) == ("cut-off", None, None)
    [line] = status_lines(seen)
    assert line.startswith("run night has ended already: its last launch left no summary in")
    assert line.endswith("another launch begins anew")
    assert stop()[0] == (0, None)


def test_an_ended_run_whose_storage_or_config_cannot_be_read_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no rights")

    ended(tmp_path, 1, None)
    monkeypatch.setattr(ended_run, "open_storage", refuse)
    [line] = status_lines(control.status("night"))
    assert "its storage does not tell: no rights" in line
    files.log_file(event_folder("night"), 1, 0).write_text(seal('{"job": {"unheard": 1}}') + "\n")
    [line] = status_lines(control.status("night"))
    assert "its config is of another version" in line
    files.log_file(event_folder("night"), 1, 0).write_text("torn")
    assert control.status("night")["state"] == "unknown"


def test_an_unknown_name_stays_a_mistake() -> None:
    for ask in (lambda: control.status("nobody"), lambda: control.stop("nobody", False, Console())):
        with pytest.raises(ConfigError, match="saw 'nobody', which does not run on this machine"):
            ask()


def test_a_run_whose_storage_was_emptied_is_not_told_to_be_launched_alone(tmp_path: Path) -> None:
    found = ended(tmp_path, 1, None)
    storage = open_storage(found.storage, "night")
    RunLog(storage).claim_term("here")
    kept = run_folder(str(tmp_path / "slots"), "night") / "n1"
    kept.mkdir(parents=True)
    kept_slots.mark(kept, {"w1.0.slot": 40}, None)
    with pytest.raises(StorageError, match="not committed; launch it again to commit that"):
        control.status("night")
    shutil.rmtree(tmp_path / "night")
    with pytest.raises(
        StorageError, match=r"committed; \S*night holds nothing of it any more: restore"
    ) as told:
        control.status("night")
    assert "from a copy and then launch it again to commit that" in str(told.value)
    assert not (tmp_path / "night").exists()
