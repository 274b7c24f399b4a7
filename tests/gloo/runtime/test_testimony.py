"""Evidence before a kill: whatever a worker is stuck in, it tells its node where, or is not waited for."""

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

from picotron_ray.runtime.heartbeat import read_page
from picotron_ray.runtime.node_agent import evidence
from picotron_ray.runtime.node_agent.evidence import ask_workers

STUCK = """
import sys, threading, time
import torch  # as in every worker; a dump of stacks amid its import may end the process
from pathlib import Path
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.testimony import testify

def a_collective_that_waits():
    threading.Lock().acquire() and lock.acquire()

def a_loop_that_never_ends():
    while True:
        pass

def holds_the_interpreter():
    import ctypes
    while True:
        ctypes.PyDLL(None).sleep(60)

def stopped():
    time.sleep(60)

folder, kind = Path(sys.argv[1]), sys.argv[2]
lock = threading.Lock()
lock.acquire()
testify(folder, "w1")
page = Page(folder / "w1.page", ElasticConfig())
page.begin(1, 2, 3, 4)
page.phase("backward")
print("ready", flush=True)
globals()[kind]()
"""


def stuck(folder: Path, kind: str) -> Any:
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(folder), kind], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    return process


@pytest.fixture
def worker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    process = stuck(tmp_path, request.param)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def ask(folder: Path, most: int = 1 << 16) -> tuple[dict[str, Any], float]:
    page = read_page(folder / "w1.page")
    assert page is not None
    began = time.monotonic()
    [found] = ask_workers(folder, [page], page.phase_since_s + 9.0, most)
    return found, time.monotonic() - began


@pytest.mark.parametrize(
    "worker", ["a_collective_that_waits", "a_loop_that_never_ends", "holds_the_interpreter"], indirect=True
)
def test_a_stuck_worker_tells_where_it_is(
    worker: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["worker"]
    for _ in range(2):
        found, took_s = ask(tmp_path)
        for _ in range(20):  # a machine with other work to do lets it answer late, or half
            if f"in {kind}" in found["stacks"]:
                break
            found, took_s = ask(tmp_path)
        assert f"in {kind}" in found["stacks"], (found, worker.poll())
        assert "most recent call first" in found["stacks"]
        assert (found["worker"], found["rank"], found["phase"], found["for_s"]) == ("w1", 3, "backward", 9.0)
        assert took_s < 5
    assert worker.poll() is None, "asking changes nothing"
    assert (tmp_path / "w1.stacks").stat().st_size == 0, "it does not grow"
    assert len(ask(tmp_path, 100)[0]["stacks"]) == 100


def test_stacks_that_are_still_being_written_are_waited_for(tmp_path: Path) -> None:
    """The writer may lose its core between two lines."""
    process = stuck(tmp_path, "stopped")
    page = read_page(tmp_path / "w1.page")
    assert page is not None
    (tmp_path / "w1.collectives").write_text("{}")
    stacks = tmp_path / "w1.stacks"
    asked = evidence._AskedWorker(page, stacks, tmp_path / "w1.collectives", "R")
    stacks.write_text('Thread 0x01 (most recent call first):\n  File "<frozen importlib')
    asked.complete(0.0)
    assert not asked.complete(9.0)
    stacks.write_text(
        "Thread 0x01 (most recent call first):\nCurrent thread 0x02 (most recent call first):\n"
    )
    asked.complete(9.0)
    assert asked.complete(18.0)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("worker", ["stopped"], indirect=True)
def test_a_worker_that_cannot_answer_is_not_waited_for(worker: Any, tmp_path: Path) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    while True:
        found, took_s = ask(tmp_path)
        if found["state"] == "T":
            break
    assert found["stacks"].startswith("no answer")
    assert took_s < evidence.ANSWER_S
    worker.kill()
    worker.wait()
    found, _ = ask(tmp_path)
    assert found["state"] == "X"


def test_a_process_that_has_no_handler_is_left_alone(tmp_path: Path) -> None:
    """The signal would be its end."""
    process = stuck(tmp_path, "stopped")
    (tmp_path / "w1.stacks").unlink()
    found, took_s = ask(tmp_path)
    assert found["stacks"].startswith("no answer")
    assert took_s < evidence.ANSWER_S
    assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("recorded", ["20", "0"])
def test_the_newest_operations_are_told_where_they_are_recorded(recorded: str) -> None:
    code = """
import torch, torch.distributed as dist
from picotron_ray.runtime.worker.newest_operations import newest_operations
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(30):
    dist.all_reduce(torch.ones(4))
print(newest_operations().decode(), flush=True)
dist.destroy_process_group()  # one that is left to the interpreter's end may abort the process
"""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": recorded}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True
    )
    entries = json.loads(done.stdout)["entries"]
    assert len(entries) == int(recorded)
    assert not entries or entries[-1]["profiling_name"] == "gloo:all_reduce"
