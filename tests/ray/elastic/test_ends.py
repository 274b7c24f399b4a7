"""An end that was decided stays the end, whatever dies on the way to it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from picotron_ray.runtime.ray_cluster.names import run_folder
from tests.support.runs.ray_runs import Watched, check_ledger, losses, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(200)]


def of_next_process(watched: Watched, killed: int, timeout_s: float = 60) -> dict[str, Any]:
    """Wait for the coordinator that Ray starts after the one of pid ``killed``; returns its first status."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            if ray.get(watched.coordinator.pid.remote(), timeout=5) != killed:
                watched.events.clear()
                return watched.look()
        time.sleep(0.1)
    raise AssertionError("no coordinator comes back")


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_a_run_whose_coordinator_restarts_in_an_outage_ends_with_all_that_it_keeps(tmp_path: Path) -> None:
    """It gets no term: its agents know a newer one than none, and obey it all the same."""
    job = tiny_job("termless", tmp_path / "store", steps=60, cluster={"max_workers": 2})
    patience = {"final_wait_s": 8.0, "retry_deadline_s": 1.0}
    job = job.model_copy(update={"storage": job.storage.model_copy(update=patience)})
    watched, folder = start(job), tmp_path / "store" / "termless"
    watched.until(lambda status: status["step"] > 5)
    pid = ray.get(watched.coordinator.pid.remote())
    folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    watched.until(lambda _: any(event["kind"] == "storage-wait" for event in watched.events))
    here = run_folder(job.snapshot.folder, job.name)
    for marker in here.glob("*/kept.json"):  # as if it died before they were marked
        marker.unlink()
    os.kill(pid, signal.SIGKILL)

    of_next_process(watched, pid)
    last = watched.until(lambda status: status["done"], 60)
    assert (last["state"], last["exit_code"], last["term"]) == ("storage", 4, 0), watched.log()
    assert not watched.pids(), "workers end with it"
    assert list(here.glob("*/kept.json"))
    assert list(here.glob("*/*.slot"))
    deadline = time.monotonic() + 30
    while [name for name in list_named_actors(all_namespaces=True) if "termless" in name["name"]]:
        assert time.monotonic() < deadline, "actors are left"
        time.sleep(0.2)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert start(job).finish()["status"] == "finished"
    assert len(losses(job)) == 60


@pytest.mark.deep
def test_a_run_that_trains_outlives_a_restart_amid_an_object_that_reads_torn(tmp_path: Path) -> None:
    job = tiny_job("torn", tmp_path, steps=100_000, cluster={"max_workers": 2})
    watched, torn = start(job), tmp_path / "torn" / "data.json"
    first = watched.until(lambda status: status["step"] > 5)
    pid, whole = ray.get(watched.coordinator.pid.remote()), torn.read_bytes()
    torn.write_bytes(whole[:5])
    os.kill(pid, signal.SIGKILL)

    of_next_process(watched, pid)
    watched.until(lambda _: any(event["kind"] == "storage-wait" for event in watched.events), 60)
    assert len(watched.pids()) == 2
    torn.write_bytes(whole)
    watched.until(lambda status: status["term"] > first["term"] and status["step"] > first["step"] + 20, 60)
    watched.coordinator.request.remote("stop")
    assert watched.finish()["status"] == "stopped"
    check_ledger(job)


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
