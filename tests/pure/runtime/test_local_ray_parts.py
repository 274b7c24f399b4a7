"""A local Ray without a Ray: its state file, its start and end, its supervisor, its processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.ray_cluster import head_command, local_ray, processes, supervisor
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay, LocalRayError
from tests.support.faults.full_folder import run_on_small_disk


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State files lie here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(local_ray, "_children", [])
    return tmp_path


def ray_at(folder: Path, **changes: Any) -> LocalRay:
    plain = {"run": "night", "mark": "m", "session": 7, "address": "a:1", "temp_folder": str(folder / "t")}
    return LocalRay(**{**plain, "token": "secret", "folders": (str(folder / "slots"),), **changes})


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, []

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps.append(seconds)


# --- state -----------------------------------------------------------------------------------------


def test_a_state_file_is_kept_for_its_owner_alone(home: Path) -> None:
    assert (local_ray.find("night"), local_ray.runs()) == (None, [])
    saved = ray_at(home)
    local_ray.save(saved)
    local_ray.save(ray_at(home, run="day"))
    assert (local_ray.find("night"), local_ray.runs()) == (saved, ["day", "night"])
    path = home / "state" / "picotron_ray" / "night.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    local_ray.save(ray_at(home, address="b:2"))
    assert local_ray.find("night") == ray_at(home, address="b:2")
    with local_ray.locked("night"):
        assert (path.parent / "night.lock").exists()


def test_a_ray_is_alive_while_its_supervisor_runs_and_the_run_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = [True]
    monkeypatch.setattr(processes, "is_member", lambda pid, mark, session: living[0])
    (home / "t").mkdir()
    assert ray_at(home).alive
    assert not ray_at(home, address="").alive, "it is starting"
    living[0] = False
    assert not ray_at(home).alive
    living[0] = True
    monkeypatch.delenv(local_ray.ENDED, raising=False)
    local_ray.announce_end()
    assert ray_at(home).alive
    monkeypatch.setenv(local_ray.ENDED, str(local_ray.ended_file(home / "t")))
    local_ray.announce_end()
    assert not ray_at(home).alive


def test_an_end_removes_what_is_its_own_and_keeps_the_logs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(processes, "end_all", lambda mark, session, grace_s: left)
    (home / "slots").mkdir()
    session = local_ray.rays_folder(home / "t") / "session_2025"
    for name in ("logs", "sockets"):
        (session / name).mkdir(parents=True)
    (session / "file").touch()
    local_ray.save(ray_at(home, mark="newer"))
    local_ray.stop(ray_at(home))
    assert (home / "slots").exists(), "a newer Ray uses it"
    assert (session / "sockets").exists()
    local_ray.save(ray_at(home))
    local_ray._children[:] = [SimpleNamespace(pid=1, poll=lambda code=code: code) for code in (None, 0)]  # type: ignore[misc]
    local_ray.stop(ray_at(home))
    assert not (home / "slots").exists()
    assert sorted(path.name for path in session.iterdir()) == ["file", "logs"]
    assert (local_ray.find("night"), len(local_ray._children)) == (None, 1)
    left.append(9)
    with pytest.raises(LocalRayError, match=r"processes \[9\] of run 'night' survive SIGKILL"):
        local_ray.stop(ray_at(home))


def test_the_supervisor_that_an_end_killed_is_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses its environment, by which it is known, before its parent can see that it is gone."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    monkeypatch.setattr(processes, "end_all", lambda mark, session, grace_s: [])
    local_ray._children[:] = [child]
    local_ray.stop(ray_at(home, session=child.pid))
    assert (child.returncode, local_ray._children) == (0, [])


# --- start -----------------------------------------------------------------------------------------


class Started:
    """What ``Popen`` was told."""

    def __init__(self, command: list[str], **named: Any) -> None:
        self.command, self.named, self.pid, self.returncode = command, named, 77, None

    def poll(self) -> int | None:
        return self.returncode


def test_a_ray_starts_in_a_session_of_its_own_with_a_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[tuple[str, float]] = []
    monkeypatch.delenv(local_ray.NICENESS, raising=False)
    monkeypatch.setattr(local_ray.subprocess, "Popen", Started)
    monkeypatch.setattr(local_ray, "stop", lambda ray, grace_s: stopped.append((ray.mark, grace_s)))
    monkeypatch.setattr(local_ray, "_wait_for_address", lambda process, folder, timeout_s: "a:9")
    monkeypatch.setattr(head_command, "_free_port", lambda: 5)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    local_ray.save(ray_at(home, mark="old"))
    folder = home / "temp"
    folder.mkdir()
    (folder / "stale").touch()
    found = local_ray.start("night", cpus=3, folders=[home / "slots"], temp_folder=folder)
    assert stopped == [("old", 0.0)]
    assert local_ray.find("night") == found
    assert (found.run, found.session, found.address, found.folders) == (
        "night", 77, "a:9", (str(home / "slots"),)
    )  # fmt: skip
    assert (len(found.mark), len(found.token)) == (32, 64)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["ray.log"]
    (process,) = local_ray._children
    assert isinstance(process, Started)
    environment = process.named["env"]
    assert process.named["start_new_session"]
    assert "RAY_ADDRESS" not in environment
    wanted = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": found.token, processes.MARK: found.mark,
        local_ray.ENDED: str(folder / "ended"), "RAY_USAGE_STATS_ENABLED": "0",
        local_ray.NICENESS: "0",
    }  # fmt: skip
    assert {name: environment[name] for name in wanted} == wanted
    assert process.command[3:5] == ["night", str(folder / "ended")]
    options = dict(word[2:].split("=") for word in process.command if "=" in word)
    assert options == {
        "port": "0", "ray-client-server-port": "5", "num-cpus": "3", "include-dashboard": "false",
        "include-log-monitor": "false", "dashboard-agent-listen-port": "0",
        "object-store-memory": "134217728", "temp-dir": str(folder / "r"),
    }  # fmt: skip
    assert head_command.head_command(folder, 3, 0)[-1] == "--num-gpus=0"
    assert local_ray.authentication("") == {}


def test_a_start_that_fails_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[tuple[str, float]] = []
    monkeypatch.delenv(local_ray.NICENESS, raising=False)
    monkeypatch.setattr(local_ray.subprocess, "Popen", Started)
    monkeypatch.setattr(local_ray, "stop", lambda ray, grace_s: stopped.append((ray.token, grace_s)))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")

    def fail(*words: Any) -> str:
        raise LocalRayError("not up")

    monkeypatch.setattr(local_ray, "_wait_for_address", fail)
    with pytest.raises(LocalRayError, match="not up"):
        local_ray.start("night", cpus=1, temp_folder=home / "temp")
    assert stopped == [("", 0.0)], "the user's own token counts"


def test_an_address_is_awaited_until_ray_is_up_or_gone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, process = Clock(), Started([])
    monkeypatch.setattr(local_ray, "time", clock)
    written = local_ray.rays_folder(home) / "ray_current_cluster"
    written.parent.mkdir()
    written.write_text(" \n")
    (home / "ray.log").touch()

    def wait() -> str:
        return local_ray._wait_for_address(process, home, 0.12)  # type: ignore[arg-type]

    with pytest.raises(LocalRayError) as late:
        wait()
    what = f"the local Ray was not up in 0.12 s: no output (all of it: {home / 'ray.log'})"
    assert (str(late.value), clock.naps) == (what, [0.05] * 3)
    (home / "ray.log").write_text("first\n last \n")
    process.returncode = 1
    with pytest.raises(LocalRayError, match=r"exited with 1: last \(all of it"):
        wait()
    process.returncode = None
    written.write_text("a:1\n")
    assert (wait(), len(clock.naps)) == ("a:1", 3)


HEADS = """
import pathlib, sys, time
folder, most = pathlib.Path(sys.argv[1]), int(sys.argv[2])
tries = folder.parent / "tries"
tries.write_text(str(n := int(tries.read_text()) + 1 if tries.exists() else 1))
if n < most:
    sys.exit("Exception: The current node timed out during startup. Or not.")
if most == 0:
    sys.exit("Exception: no such option")
(folder / "r").mkdir()
(folder / "r" / "ray_current_cluster").write_text("a:1")
time.sleep(60)
"""
"""A Ray's head whose first starts are too slow for Ray; with ``most`` 0, one that fails otherwise."""


@pytest.fixture
def slow_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalRay]:
    """Start such heads, under real supervisors, as launch does: with the run's lock."""

    def start(most: int, timeout_s: float = 20.0) -> LocalRay:
        def head(folder: Path, cpus: int, gpus: int | None) -> list[str]:
            return [sys.executable, "-c", HEADS, str(folder.parent), str(most)]

        monkeypatch.setattr(local_ray, "head_command", head)
        with local_ray.locked("night"):
            return local_ray.start("night", cpus=1, temp_folder=home / "temp", timeout_s=timeout_s)

    return start


def test_a_start_that_was_too_slow_for_ray_is_begun_again(
    home: Path, slow_start: Callable[..., LocalRay]
) -> None:
    """Ray gives itself 30 s, and a machine with ten runnable processes a core does not keep them."""
    ray = slow_start(3)
    assert (ray.address, (home / "tries").read_text()) == ("a:1", "3")
    local_ray.stop(ray, grace_s=0.0)


def test_starts_that_stay_too_slow_end_in_time(home: Path, slow_start: Callable[..., LocalRay]) -> None:
    with pytest.raises(LocalRayError, match=r"(exited with 1: .* timed out during startup|not up in 1 s)"):
        slow_start(1_000, timeout_s=1.0)
    assert local_ray.find("night") is None


def test_a_head_that_fails_is_told_at_once(home: Path, slow_start: Callable[..., LocalRay]) -> None:
    """Its supervisor waits for the lock, which the start has; so for two minutes nothing was said."""
    began = time.monotonic()
    with pytest.raises(LocalRayError, match="exited with 1: Exception: no such option"):
        slow_start(0)
    assert (home / "tries").read_text() == "1"
    assert time.monotonic() - began < 10


def test_a_full_home_ends_the_ray_that_was_just_started(tmp_path: Path) -> None:
    """Nobody would find it again: neither ``stop`` nor the next launch."""
    code = """
import os, sys
os.environ["XDG_STATE_HOME"] = str(folder)
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.ray_cluster import local_ray, processes
from tests.support.faults.full_folder import run_on_small_disk
local_ray.head_command = lambda *words: [sys.executable, "-c", "import time; time.sleep(90)"]
begun = []
real = local_ray.save
local_ray.save = lambda ray: begun.append(ray) or real(ray)
with local_ray.locked("night"):
    fill(folder)
    try:
        local_ray.start("night", cpus=1, temp_folder=folder.parent / "temp", timeout_s=20.0)
    except ConfigError as error:
        print(str(error).partition(",")[0].replace(str(folder), ""))
print(len(begun), processes.is_member(begun[0].session, begun[0].mark, begun[0].session))
print(sorted(path.name for path in local_ray.state_folder().iterdir()))
"""
    (tmp_path / "home").mkdir()
    said = run_on_small_disk(tmp_path / "home", code).splitlines()
    assert said[0] == "XDG_STATE_HOME: /picotron_ray takes no more (No space left on device)"
    assert said[1:] == ["1 False", "['night.lock']"]


# --- supervisor ------------------------------------------------------------------------------------


def test_a_supervisor_lingers_after_the_end_of_the_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ended = Clock(), home / "ended"
    monkeypatch.setattr(supervisor, "time", clock)
    polls = iter([None, None, 0])
    head: Any = SimpleNamespace(poll=lambda: next(polls))
    keeper = supervisor.StateKeeper("night", "mine")
    supervisor._wait(head, ended, os.getppid(), keeper)
    assert len(clock.naps) == 2, "until Ray is gone"
    ended.touch()
    os.utime(ended, (clock.now, clock.now))
    begun, head.poll = clock.now, lambda: None
    monkeypatch.setattr(supervisor, "POLL_S", 0.5)
    supervisor._wait(head, ended, os.getppid(), keeper)
    assert clock.now == begun + supervisor.LINGER_S + 0.5


def test_a_supervisor_ends_what_died_before_it_had_a_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, keeper = Clock(), supervisor.StateKeeper("night", "mine")
    monkeypatch.setattr(supervisor, "time", clock)
    polls = [0, None, None, None]
    head: Any = SimpleNamespace(poll=polls.pop)
    gone = os.getppid() + 1
    supervisor._wait(head, home / "ended", gone, keeper)
    assert (len(polls), clock.naps) == (3, []), "whoever started it is gone"
    local_ray.begin(ray_at(home, temp_folder=str(home)))
    supervisor._wait(head, home / "ended", gone, keeper)
    assert (len(polls), len(clock.naps)) == (0, 2), "its run goes on without that"
    with pytest.raises(LocalRayError, match=r"of run night needs .*gone/begun: No such file"):
        local_ray.begin(ray_at(home, temp_folder=str(home / "gone")))


@pytest.mark.parametrize(("mark", "terminated"), [("mine", False), ("newer", False), ("mine", True)])
def test_a_supervisor_ends_all_and_cleans_up_unless_others_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, mark: str, terminated: bool
) -> None:
    told: list[Any] = []
    head = SimpleNamespace(poll=lambda: None, terminate=lambda: told.append("terminate"), wait=lambda: 5)

    def wait(head: Any, ended: Path, starter: int, keeper: Any) -> None:
        if terminated:
            supervisor._terminate(15, None)

    monkeypatch.setenv(processes.MARK, "mine")
    monkeypatch.setattr(supervisor.subprocess, "Popen", lambda command: told.append(command) or head)
    monkeypatch.setattr(supervisor.signal, "signal", lambda number, handler: told.append((number, handler)))
    monkeypatch.setattr(supervisor, "_wait", wait)
    monkeypatch.setattr(processes, "end_all", lambda *words, grace_s: told.append((*words, grace_s)))
    monkeypatch.setattr(local_ray, "stop", lambda ray, grace_s: told.append(("stop", ray.mark, grace_s)))
    local_ray.save(ray_at(home, mark=mark))
    assert supervisor.main("night", str(home / "ended"), 7, ["ray"]) == 5
    stopped = [("stop", "mine", 0.0)] if mark == "mine" and not terminated else []
    assert told == [
        (signal.SIGTERM, supervisor._terminate),
        ["ray"],
        (signal.SIGTERM, signal.SIG_IGN),
        "terminate",
        ("mine", os.getpid(), 2.0),
        *stopped,
    ]
    told.clear()
    head.poll = lambda: 0
    supervisor._end(head, "mine")  # type: ignore[arg-type]
    assert "terminate" not in told, "it is gone"


# --- processes -------------------------------------------------------------------------------------


class Proc:
    """A /proc of our own: pid: (state, session, mark)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir()

    def add(self, pid: int, state: str = "S", session: int = 7, mark: str | None = None) -> None:
        folder = self.root / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a ) b) {state} 1 2 {session} 0\n")
        marks = [] if mark is None else [f"{processes.MARK}={mark}"]
        (folder / "environ").write_bytes("\0".join(["A=1", *marks, "B=2"]).encode())

    def __call__(self, path: str) -> Path:
        return Path(path.replace("/proc", str(self.root), 1))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    made = Proc(tmp_path)
    monkeypatch.setattr(processes, "Path", made)
    return made


def test_a_rays_own_processes_are_told_by_mark_and_session(proc: Proc) -> None:
    proc.add(7, mark="m")
    proc.add(8)
    proc.add(9, session=4, mark="m")
    proc.add(10, state="Z", mark="m")
    proc.add(11, session=1)
    proc.add(12, session=1, mark="mm")
    proc.add(os.getpid(), mark="m")
    assert sorted(processes.members("m", 7)) == [7, 8, 9]
    assert processes.members("x", 7) == [], "the leader is a stranger: its number was used again"
    assert sorted(processes.members("x", 3)) == []
    assert not processes.is_member(99, "m", 7)
    assert sorted(processes.members("mm", 1)) == [11, 12], "of a session without a leader"


def test_members_are_asked_once_and_killed_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = Clock(), []
    monkeypatch.setattr(processes, "time", clock)
    monkeypatch.setattr(processes, "send", lambda pid, mark, session, number: sent.append((pid, number)))
    living = iter([[7, 8], [7, 8], [8], [8], []])
    monkeypatch.setattr(processes, "members", lambda mark, session: next(living))
    assert processes.end_all("m", 7, 0.1) == []
    assert sent == [(7, signal.SIGTERM), (8, signal.SIGKILL)]
    assert clock.naps == [0.05] * 3
    clock.naps.clear()
    sent.clear()
    monkeypatch.setattr(processes, "members", lambda mark, session: [8])
    assert processes.end_all("m", 7, 0.0) == [8]
    assert sum(clock.naps) == pytest.approx(5.0, abs=0.06)
    assert len(sent) == len(clock.naps) + 1


def test_a_signal_reaches_a_member_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    member = [True]
    monkeypatch.setattr(processes.os, "pidfd_open", lambda pid: pid + 1000)
    monkeypatch.setattr(processes.os, "close", lambda handle: told.append(("close", handle)))
    monkeypatch.setattr(
        processes.signal, "pidfd_send_signal", lambda handle, number: told.append((handle, number))
    )
    monkeypatch.setattr(processes, "is_member", lambda pid, mark, session: member[0])
    processes.send(8, "m", 7, signal.SIGKILL)
    member[0] = False
    processes.send(8, "m", 7, signal.SIGKILL)
    assert told == [(1008, signal.SIGKILL), ("close", 1008), ("close", 1008)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "night"}', '{"folders": 3}'])
def test_a_damaged_state_file_is_named(home: Path, text: str) -> None:
    local_ray.state_folder().mkdir(parents=True, exist_ok=True)
    local_ray.state_file("night").write_text(text)
    with pytest.raises(LocalRayError, match=r"night\.json cannot be read .*end that by hand, then remove"):
        local_ray.find("night")


def test_a_folder_for_launchs_state_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ConfigError, match=r"XDG_STATE_HOME: .* cannot be written"), local_ray.locked("night"):
        pass


def test_a_temporary_folder_that_is_too_long_for_rays_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would be waited for in vain, for two minutes."""
    local_ray.refuse_long_folder("night")
    sockets = f"session_2026-11-23_10-29-44_375116_{os.getpid()}/sockets/plasma_store"
    most = local_ray.SOCKET_PATH - len(f"/picotron-{os.getuid()}-12345678/r/{sockets}")
    monkeypatch.setattr(local_ray.tempfile, "gettempdir", lambda: "/" + "x" * (most - 1))
    local_ray.refuse_long_folder("night")
    monkeypatch.setattr(local_ray.tempfile, "gettempdir", lambda: "/" + "x" * most)
    with pytest.raises(ConfigError, match=f"TMPDIR: saw /x*, expected at most {most} characters"):
        local_ray.refuse_long_folder("night")
    named = local_ray.rays_folder(local_ray.default_temp_folder("night")) / sockets
    assert len(str(named)) == local_ray.SOCKET_PATH + 1


def test_a_cleaner_of_temporary_files_ends_no_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changes the file that tells of the begin, so after some days it is the oldest there."""
    clock, keeper = Clock(), supervisor.StateKeeper("night", "mine")
    monkeypatch.setattr(supervisor, "time", clock)
    local_ray.begin(ray_at(home, temp_folder=str(home)))
    polls = [0, None, None, None]

    def poll() -> int | None:
        if len(polls) == 3:
            (home / "begun").unlink()
        return polls.pop()

    supervisor._wait(SimpleNamespace(poll=poll), home / "ended", os.getppid() + 1, keeper)  # type: ignore[arg-type]
    assert (len(polls), len(clock.naps)) == (0, 3)
