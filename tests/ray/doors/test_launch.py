"""The user's door: launch, attach, stop, kill and resume, each through the command line in its own process.

Runs are tiny but real: a local Ray of their own, worker processes, storage on disk.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.runtime.ray_cluster import local_ray as lifecycle
from picotron_ray.runtime.ray_cluster import processes, supervisor
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_cluster.names import event_folder, run_folder
from tests.support.runs.replays import check_replay

pytestmark = pytest.mark.timeout(400)  # seconds on an idle machine; several Rays may share two cores
OFFLINE = ("checkpoints", "ledger", "logs")  # commands that join no Ray: no process of their own for them
LONG = ("steps=100000", "checkpoint.interval_steps=20", "evaluate.interval_steps=100000")


class Door:
    """The command line, for one run name and storage folder."""

    def __init__(self, run: str, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.overrides = (f"name={run}", f"storage.url={folder}", "cluster.device=cpu")

    def start(self, *overrides: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "picotron_ray.launch", "tiny", *self.overrides, *overrides, *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def command(self, *words: str, expect: int = 0) -> str:
        if words[0] in OFFLINE and "RAY_ADDRESS" not in os.environ:  # else it may connect to Ray
            done = CliRunner().invoke(app, list(words))
            assert done.exit_code == expect, done.output
            return done.stdout if expect == 0 else done.stderr
        return self._in_a_process(words, expect)

    def _in_a_process(self, words: tuple[str, ...], expect: int) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "picotron_ray.cli", *words], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout if expect == 0 else done.stderr

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.command("status", self.run, "--json")))

    def named_actors(self) -> list[str]:
        """Living actors of the run on the cluster that RAY_ADDRESS names."""
        program = (
            "import json, ray\n"
            "from ray.util import list_named_actors\n"
            "ray.init(log_to_driver=False, logging_level='ERROR')\n"
            "print(json.dumps([a['name'] for a in list_named_actors(all_namespaces=True)]))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        names = json.loads(done.stdout.splitlines()[-1])
        return [name for name in names if name.startswith(f"{self.run}/")]

    def ledger(self) -> dict[str, Any]:
        return dict(json.loads(self.command("ledger", "verify", "tiny", *self.overrides, "--json")))


@pytest.fixture
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Door]:
    door = Door(request.node.name.replace("_", "-")[:40], tmp_path / "runs")
    yield door
    ray = lifecycle.find(door.run)
    if ray is not None:
        lifecycle.stop(ray, grace_s=0.0)


def wait_for(condition: Callable[[], Any], timeout_s: float = 150.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)
    return found


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to the first line that contains ``text``."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}:\n{seen}")


def assert_nothing_left(ray: LocalRay) -> None:
    assert processes.members(ray.mark, ray.session) == []
    assert lifecycle.find(ray.run) is None
    assert not any(Path(folder).exists() for folder in ray.folders)


def found(run: str) -> LocalRay:
    ray = lifecycle.find(run)
    assert ray is not None
    return ray


def stored(door: Door) -> dict[str, bytes]:
    """Every object of the run; the probe of the storage leaves none."""
    folder = door.folder / door.run
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_telemetry(door: Door) -> None:
    """Steps of the running generation are timed: in the status, and for Prometheus."""
    told = wait_for(lambda: door.status()["telemetry"])
    assert (told["generation"], told["ranks"], len(told["replica_row_s"])) == ("1.1", 2, 2)
    phases = {phase: window["mean"] for phase, window in told["phase_s"].items()}
    assert sum(phases.values()) == pytest.approx(told["step_s"]["mean"], rel=0.01)
    assert phases["forward"] > 0 < phases["backward"]
    assert told["memory"]["device_bytes"] >= told["memory"]["peak_bytes"] > 0
    endpoints = door.status()["metrics"]["endpoints"]
    agent = next(address for who, address in endpoints.items() if who != "coordinator")
    with urllib.request.urlopen(f"http://{agent}/metrics", timeout=30) as answer:
        served = answer.read().decode()
    assert (
        len(re.findall(r'^picotron_worker_phase_seconds\{.*phase="forward".*statistic="mean"', served, re.M))
        == 2
    )
    assert re.search(r'^picotron_worker_sent_bytes\{axis="dp"', served, re.M)


def test_a_killed_driver_leaves_the_run_and_sigterm_stops_it_with_a_commit(door: Door) -> None:
    with door.start(*LONG, "telemetry.interval_s=1") as driver:
        read_until(driver, "committed")
        driver.kill()
    ray = found(door.run)
    before = door.status()["step"]
    shown = door.command("status", door.run)
    assert "[running]" in shown
    assert all(re.search(rf"rank {rank}: w1-\d, process \d+, ", shown) for rank in range(2)), shown
    refused = door.command("checkpoints", "gc", "tiny", *door.overrides, expect=2)
    assert "goes on and collects by itself" in refused
    assert "is committed" in door.command("checkpoint-now", door.run)
    check_telemetry(door)
    with door.start(*LONG) as again:
        assert "attached to run" in read_until(again, "[running]")
        assert door.status()["step"] > before, "workers must have gone on"
        assert door.status()["generation"] == "1.1", "the same generation, untouched"
        again.send_signal(signal.SIGTERM)
        out, _ = again.communicate(timeout=150)
    assert again.returncode == 130, out
    assert_nothing_left(ray)
    ledger = door.ledger()
    assert ledger["ok"]
    assert ledger["steps"] > before
    assert f"at step {ledger['steps']} " in out, "what was committed is the step it stopped at"
    assert check_replay(event_folder(door.run)) == 1
    assert any('"Measured"' in log.read_text() for log in event_folder(door.run).glob("*.jsonl"))


def test_sigkill_of_everything_resumes_from_the_last_commit_and_goes_away_by_itself(door: Door) -> None:
    with door.start(*LONG) as driver:
        read_until(driver, "committed")
        ray = found(door.run)
        for pid in [driver.pid, *processes.members(ray.mark, ray.session)]:
            os.kill(pid, signal.SIGKILL)
    committed = json.loads(door.command("checkpoints", "ls", "tiny", *door.overrides, "--json"))[-1]["step"]
    steps = committed + 40
    with door.start(*LONG, f"steps={steps}", options=("--detach",)) as again:
        out, _ = again.communicate(timeout=200)
    assert again.returncode == 0, out
    ray = found(door.run)
    wait_for(lambda: not processes.members(ray.mark, ray.session), 90 + supervisor.LINGER_S)
    assert "generation 2.1 rank 0: " in door.command("logs", door.run)
    summary = json.loads((door.folder / door.run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    assert summary["generations"][-1]["start_step"] == committed
    assert summary["ledger"] == {
        "samples": 8 * steps, "lost": 0, "repeated": 0, "skipped": 0, "passed_over": 0,
        "checked": "tokens", "wrong": []
    }  # fmt: skip
    assert_nothing_left(ray)
    ledger = door.ledger()
    assert (ledger["ok"], ledger["steps"]) == (True, steps)
    rows = json.loads(door.command("checkpoints", "ls", "tiny", *door.overrides, "--json"))
    assert rows[-1]["step"] == steps
    assert door.command("checkpoints", "verify", "tiny", *door.overrides).count("none") == len(rows)
    assert door.command("status", door.run).splitlines()[:2] == [
        f"run {door.run} has ended already",
        f"run {door.run} finished at step {steps}, {summary['wall_s']:.1f} s after it first began",
    ]

    before = stored(door)
    with door.start("model.layers=4", "seed=5") as other:
        out, _ = other.communicate(timeout=100)
    assert other.returncode == 2
    assert [line.split(":")[1].strip() for line in out.splitlines() if line.startswith("error")] == [
        "seed",
        "model.layers",
    ]
    assert stored(door) == before, "a refused launch overwrites nothing"


@pytest.mark.deep
def test_on_a_given_cluster_a_run_ends_without_a_trace(
    door: Door, local_ray: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", local_ray.address)
    with door.start("cluster.min_workers=2", "cluster.cpus_per_worker=5") as driver:
        out, _ = driver.communicate(timeout=150)
    assert driver.returncode == 2
    assert "error: cluster.min_workers: the cluster has room for 1 workers of 5 CPU each" in out
    assert door.named_actors() == []
    with door.start(options=("--json",)) as driver:
        out, _ = driver.communicate(timeout=200)
    assert driver.returncode == 0, out
    assert "finished at step 8" in out
    summary = json.loads(out.splitlines()[-1])
    assert (summary["status"], summary["steps"]) == ("finished", 8)
    assert door.named_actors() == []
    assert not run_folder("/dev/shm", door.run).exists()
    with door.start(*LONG) as driver:
        read_until(driver, "[running]")
        driver.kill()
    wait_for(lambda: len(door.named_actors()) == 4)  # coordinator, agent, two workers
    assert "goes on" in door.command("checkpoints", "gc", "tiny", *door.overrides, expect=2)
    assert "stopped at step" in door.command("stop", door.run)
    assert door.named_actors() == []
    assert "has ended already" in door.command("stop", door.run)
    assert json.loads(door.command("status", door.run, "--json"))["state"] == "stopped"
    assert "which does not run on the Ray at" in door.command("stop", "never-launched", expect=2)
    assert not run_folder("/dev/shm", door.run).exists()
    assert local_ray.alive, "the cluster is not ours to stop"


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_stop_now_leaves_nothing_and_is_told_to_whoever_follows(
    given: bool, door: Door, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("local_ray").address)
    with door.start(*LONG) as driver:
        read_until(driver, "[running]")
        assert "ended" in door.command("stop", "--now", door.run)
        began = time.monotonic()
        out, _ = driver.communicate(timeout=100)
    assert driver.returncode == 1
    assert f"error: run {door.run} was ended from outside" in out
    assert time.monotonic() - began < 40.0, "Ray's own client would end the process after a minute"
    assert not given or door.named_actors() == []
    assert not run_folder("/dev/shm", door.run).exists()


@pytest.mark.slow
def test_second_interrupt_leaves_the_run_and_stop_removes_what_a_sigkill_left(door: Door) -> None:
    with door.start(*LONG, "elastic.interrupt_timeout_s=30") as driver:
        read_until(driver, "[running]")
        ray = found(door.run)
        workers = [
            pid for pid in processes.members(ray.mark, ray.session) if title(pid).startswith(b"ray::Worker")
        ]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # so that the stop cannot be quick
        driver.send_signal(signal.SIGINT)
        read_until(driver, "stopping at the next step")
        driver.send_signal(signal.SIGINT)
        out, _ = driver.communicate(timeout=30)
    assert driver.returncode == 1, out
    assert "left running" in out
    assert found(door.run).alive
    os.kill(ray.session, signal.SIGKILL)
    assert Path(ray.folders[0]).exists()
    assert "ended what was left" in door.command("stop", door.run)
    assert_nothing_left(ray)
    assert "left no summary" in door.command("stop", door.run)


def test_a_stop_during_the_start_is_waited_for_and_the_status_says_starting(door: Door) -> None:
    """Seen refused, with the run going on, until its coordinator was there."""
    with door.start(*LONG) as driver:
        wait_for(lambda: lifecycle.find(door.run) is not None)  # its Ray is being started
        shown = door.command("status", door.run)
        assert f"[starting] run {door.run} is being launched by process {driver.pid}" in shown
        told = door.command("stop", door.run)
        assert "waiting for its coordinator" in told
        assert "stopped at step" in told
        out, _ = driver.communicate(timeout=100)
    assert driver.returncode == 130, out
    assert lifecycle.find(door.run) is None


def title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_refuses_before_anything_is_started(door: Door, tmp_path: Path) -> None:
    read_only = tmp_path / "file"
    read_only.write_text("not a folder")
    cases = {
        ("steps=0",): (2, "steps:"),
        ("data.source=text", f"data.path={tmp_path / 'nothing'}"): (2, "data.path"),
        (f"storage.url={read_only}",): (4, "file"),
    }
    for overrides, (code, text) in cases.items():
        with door.start(*overrides) as driver:
            out, _ = driver.communicate(timeout=150)
        assert (driver.returncode, out.count("error: ")) == (code, 1), out
        assert text in out
        assert "Traceback" not in out
        assert lifecycle.find(door.run) is None
        assert not (door.folder / door.run / "log").exists()


@pytest.mark.deep
def test_a_small_memory_folder_is_left_for_the_overflow_folder(door: Door, tmp_path: Path) -> None:
    """A real one of 1 MB, in a mount namespace of the launch's own."""
    small, disk = tmp_path / "small", tmp_path / "disk"
    small.mkdir()
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {small}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces are not permitted here")
    folders = (f"snapshot.folder={small}", f"snapshot.overflow_folder={disk}")
    words = (*door.overrides, "steps=20", "checkpoint.interval_steps=10", *folders)
    command = [sys.executable, "-m", "picotron_ray.launch", "tiny", *words, "--json"]
    script = f'{mount} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *command],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"; using {disk} instead (slower)") == 1
    assert "note: snapshot" not in done.stderr.replace("note: snapshot.folder: saw", "", 1), (
        "no change to tell"
    )
    summary = json.loads(done.stdout.splitlines()[0])
    assert (summary["status"], summary["steps"], summary["failures"]) == ("finished", 20, [])
