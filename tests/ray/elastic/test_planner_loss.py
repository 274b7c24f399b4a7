"""The planner's process is killed and frozen under a run, workers are killed meanwhile, and it goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.runs.ray_runs import Watched, check_ledger, kill, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(600), pytest.mark.deep]


def planner_of(watched: Watched) -> int:
    """Pid of the run's planner: the child of its coordinator that serves plans; 0 where there is none."""
    import ray

    parent = ray.get(watched.coordinator.pid.remote())
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"picotron_ray.runtime.planning.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return 0


def test_a_run_goes_on_without_its_planner(tmp_path: Path) -> None:
    job = tiny_job(
        "planless", tmp_path, steps=100_000, checkpoint={"interval_steps": 1000}, cluster={"max_workers": 3}
    )
    watched = start(job)
    watched.until(lambda s: s["step"] >= 10)
    first = planner_of(watched)
    kill(first)
    kill(next(iter(watched.pids().values())))
    watched.until(lambda s: len(s["members"]) == 2 and s["step"] > 12)
    watched.until(lambda s: len(s["members"]) == 3)
    second = planner_of(watched)
    assert second not in (0, first), "growth needed a plan, so there is another planner"
    os.kill(second, signal.SIGSTOP)
    step = watched.until(lambda s: s["step"] > 0)["step"]
    for pid in list(watched.pids().values())[:2]:
        kill(pid)
    watched.until(lambda s: s["step"] > step + 10)
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped"
    assert not Path(f"/proc/{second}").exists(), "it went with the run, frozen as it was"
    assert {event["kind"] for event in watched.events} >= {"plan", "recovery"}
    check_ledger(job)
