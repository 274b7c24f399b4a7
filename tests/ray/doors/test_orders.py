"""Operators' commands on a run of its own Ray: pause, resume, resize, drain, nodes; SIGUSR1, time limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.runtime.heartbeat import process_alive, read_page
from picotron_ray.runtime.ray_cluster import local_ray, processes
from picotron_ray.runtime.ray_cluster.names import event_folder, run_folder
from tests.support.runs.replays import check_replay

pytestmark = [pytest.mark.deep, pytest.mark.timeout(500)]
SMALL = (
    "cluster.device=cpu",
    "cluster.max_workers=2",
    "precision=fp64",
    "checkpoint.interval_steps=50",
    "evaluate.interval_steps=100000",
    "optimizer.schedule.kind=constant",
)


class Run:
    """A run by its command line."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.process: subprocess.Popen[str] | None = None

    def launch(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "picotron_ray.launch", "tiny", f"name={self.name}", *SMALL]
        command += [f"storage.url={self.folder}", *words, "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self.process

    def say(self, *words: str, code: int = 0) -> Any:
        command = [sys.executable, "-m", "picotron_ray.cli", words[0], self.name, *words[1:], "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def until(self, step: int, timeout_s: float = 200.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            command = [sys.executable, "-m", "picotron_ray.cli", "status", self.name, "--json"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
            status = json.loads(done.stdout) if done.returncode == 0 else {}
            if status.get("step", -1) >= step:
                return dict(status)
            assert self.process is not None
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.5)
        raise AssertionError(f"step {step} was not reached")

    def end(self) -> tuple[int, dict[str, Any]]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=300)
        assert out, err
        return self.process.returncode, json.loads(out.splitlines()[-1])

    def workers(self) -> list[int]:
        """Pids of the workers that live."""
        pages = run_folder("/dev/shm", self.name).glob("*/*.page")
        views = [view for page in pages if (view := read_page(page)) is not None]
        return [view.pid for view in views if process_alive(view.pid, view.start_ticks)]

    def losses(self) -> list[float]:
        storage = open_storage(StorageConfig(url=str(self.folder)), self.name)
        log = RunLog(storage)
        log.refresh()
        good = latest_good(storage, log)
        assert good is not None
        return [json.loads(line)["loss"] for line in read_ledger(storage, good.manifest)]

    def coordinator(self) -> int:
        """Pid of the run's coordinator."""
        ray = local_ray.find(self.name)
        assert ray is not None
        (pid,) = [p for p in processes.members(ray.mark, ray.session) if "ray::Coordinator" in _title(p)]
        return pid


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    found = Run(f"orders-{os.getpid()}-{abs(hash(request.node.name)) % 10_000}", tmp_path)
    yield found
    subprocess.run(
        [sys.executable, "-m", "picotron_ray.cli", "stop", found.name, "--discard"], capture_output=True
    )
    if found.process is not None:
        found.process.kill()
        found.process.communicate()


def test_a_paused_run_goes_on_bitwise_also_after_its_coordinator_died(run: Run, tmp_path: Path) -> None:
    calm = Run(run.name + "-calm", tmp_path / "calm")
    calm.launch("steps=400")
    assert calm.end()[0] == 0
    run.launch("steps=400", "chaos=[{fault: slow, target: 'worker:0', step: 1, row_s: 0.01}]")
    run.until(20)
    said = run.say("pause")
    assert said["step"] >= 20
    assert run.workers() == [], "devices are free"
    assert run.say("status")["state"] == "paused"
    assert run.say("pause")["text"].startswith("paused at step"), "told twice"
    assert run.say("checkpoint-now")["step"] == said["step"], "committed already"
    os.kill(run.coordinator(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (status := run.say("status"))["state"] != "paused" or status["term"] < 2:
        assert time.monotonic() < deadline, status
        time.sleep(0.5)
    assert run.workers() == [], "the next coordinator knows of the pause"
    assert run.say("resume")["accepted"]
    code, summary = run.end()
    assert (code, summary["status"]) == (0, "finished")
    assert run.losses() == calm.losses(), "bit for bit"
    assert summary["failures"] == []
    assert summary["paused_s"] > 3.0
    assert summary["lived_s"] == pytest.approx(summary["wall_s"] - summary["paused_s"], abs=1e-6)
    assert (summary["ledger"]["lost"], summary["ledger"]["repeated"]) == (0, 0)
    assert check_replay(event_folder(run.name)) == 2


def test_a_run_changes_its_size_and_keeps_its_last_node(run: Run) -> None:
    run.launch("steps=100000", "layout.tp=1", "layout.pp=1")
    run.until(10)
    (node,) = run.say("nodes")
    assert [worker["rank"] for worker in node["workers"]] == [0, 1]
    assert "the last one" in run.say("drain", node["node"][:6], code=2)["error"]
    assert "expected at least 1" in run.say("resize", "0", code=2)["error"]
    assert "the run's are" in run.say("drain", "nowhere", code=2)["error"]
    assert run.say("resize", "1")["accepted"]
    deadline = time.monotonic() + 100
    while len(run.workers()) != 1 or len(run.say("status")["members"]) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert run.say("resize", "--max", "2")["max_workers"] == 2
    while len(run.say("status")["members"]) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert run.say("stop")["status"] == "stopped"
    assert check_replay(event_folder(run.name)) == 1


def test_a_signal_of_a_queue_and_a_time_limit_stop_with_a_commit(run: Run) -> None:
    launch = run.launch("steps=100000")
    run.until(10)
    launch.send_signal(signal.SIGUSR1)
    code, summary = run.end()
    assert (code, summary["status"], summary["requeue"]) == (75, "stopped", True)
    first = summary["checkpoints"][-1]["step"]
    began = time.monotonic()
    run.launch("steps=100000", "cluster.max_wall_s=60")  # a queue launches it again, word for word
    code, summary = run.end()
    assert time.monotonic() - began < 75, "60 s, and the start of a process and of Ray"
    assert (code, summary["status"], summary["requeue"]) == (75, "stopped", True)
    assert summary["generations"][-1]["start_step"] == first
    assert summary["checkpoints"][-1]["step"] == summary["steps"] > first
    refused = run.launch("steps=100000", "cluster.deadline=2026-01-01T00:00:00Z")
    assert "cluster.deadline: saw 2026-01-01T00:00:00" in run.end()[1]["error"]
    assert refused.returncode == 2
