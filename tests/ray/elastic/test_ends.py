"""An end that was decided stays the end, whatever dies on the way to it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from picotron_ray.runtime.ray_cluster.names import run_folder
from tests.support.runs.ray_runs import check_ledger, losses, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(200)]


def test_a_stopped_run_does_not_rise_again_when_its_coordinator_dies_on_the_way_out(tmp_path: Path) -> None:
    """Drivers have their exit code by then, and nobody would follow what trains on."""
    job = tiny_job("risen", tmp_path, steps=100_000, cluster={"max_workers": 2})
    watched = start(job)
    watched.until(lambda status: status["step"] > 5)
    pid = ray.get(watched.coordinator.pid.remote())
    watched.coordinator.request.remote("stop")
    first = watched.until(lambda status: status["done"])
    os.kill(pid, signal.SIGKILL)

    deadline = time.monotonic() + 60
    while (second := watched.look())["term"] == first["term"] or not second["done"]:
        assert time.monotonic() < deadline, watched.log()
        time.sleep(0.1)
    assert (second["state"], second["exit_code"]) == (first["state"], first["exit_code"]) == ("stopped", 130)
    told = ("status", "steps", "committed_step", "detail")
    assert [second["summary"].get(key) for key in told] == [first["summary"].get(key) for key in told]
    assert [event["kind"] for event in watched.events].count("generation") == 1
    assert not watched.pids()
    assert not run_folder(job.snapshot.folder, job.name).exists()
    watched.finish()
    assert len(losses(job)) == first["summary"]["steps"]
    check_ledger(job)
    following = start(job.model_copy(update={"steps": first["summary"]["steps"] + 5}))
    assert following.finish()["status"] == "finished", "another launch goes on"
