"""Process groups: abort from another thread, death and stop of a peer, life after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.gloo.parallel_jobs.group_jobs import blocked, generations, late, meeting, total
from tests.support.gloo.pool import Pool


def test_generations_follow_each_other_in_living_processes(pool: Pool) -> None:
    pids = [worker.pid for worker in pool.need(4)]
    for count in (4, 3, 2, 1, 4):
        assert pool.run(count, total) == [count * (count - 1) / 2] * count
    assert [worker.pid for worker in pool.need(4)] == pids


def test_generations_leave_no_sockets_behind(pool: Pool) -> None:
    for seen in pool.run(4, generations, 6):
        assert max(seen[1:]) == seen[1], f"sockets after each generation: {seen}"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["world", "mesh", "recv"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_peer_releases_everyone(
    pool: Pool, tmp_path: Path, kind: str, how: signal.Signals
) -> None:
    members = pool.need(4)
    # Ranks that do not talk to the dead one hear nothing: a coordinator's order to abort ends their wait.
    pool.start(members, blocked, kind, 1, str(tmp_path / "ready"), 0.5)
    wait_for(tmp_path / "ready")
    os.kill(members[1].pid, how)
    replies = [worker.receive(20) for worker in members if worker is not members[1]]
    for reply in replies:
        assert reply["released_s"] < 1.5, replies  # 0.5 of them before the order to abort
        assert "lost a peer" in reply["error"]
        assert "lost a peer" in reply["again"], "a collective after the abort must raise too"
    pool.drop([members[1]])
    assert pool.run(3, total) == [3.0] * 3
    assert [w.pid for w in pool.need(3)] == [w.pid for w in members if w is not members[1]]


def test_a_killed_peer_is_noticed_without_an_abort(pool: Pool, tmp_path: Path) -> None:
    members = pool.need(2)
    pool.start(members, blocked, "world", 1, str(tmp_path / "ready"), None)
    wait_for(tmp_path / "ready")
    killed = time.monotonic()
    pool.drop([members[1]])
    assert members[0].receive(20)["end"] - killed < 0.5


def test_a_rendezvous_can_be_aborted(pool: Pool) -> None:
    members = pool.need(3)
    pool.start(members, late, 2, 0.2)
    replies = [worker.receive(20) for worker in members]
    for reply in replies[:2]:
        assert 0.15 < reply["released_s"] < 1.0
        assert "aborted" in reply["error"]
    assert pool.run(3, total) == [3.0] * 3


def test_ranks_wait_in_the_store_for_as_long_as_one_of_them_needs(pool: Pool) -> None:
    first, second = pool.run(2, meeting, 0.6, None)
    assert first["error"] == second["error"] == ""
    assert first["wall_s"] > 0.4
    assert first["calls"] >= 4, "it says all the time that it lives"
    assert second["wall_s"] < 0.4


def test_a_wait_in_the_store_can_be_aborted(pool: Pool) -> None:
    first, _ = pool.run(2, meeting, 1.5, 0.2)
    assert first["wall_s"] < 1.2
    assert "aborted" in first["error"]
    assert pool.run(2, total) == [1.0] * 2


def test_the_store_dies_with_its_parent() -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'picotron_ray.comm.rendezvous_store', '--parent-pid',"
        " str(os.getpid())], stdout=subprocess.PIPE, text=True)\n"
        "print(p.pid, p.stdout.readline(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, address = parent.stdout.readline().split(" ", 1)
    assert json.loads(address)["port"] > 0
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as status:
            if status.read().rsplit(")", 1)[1].split()[0] == "Z":
                return
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")
