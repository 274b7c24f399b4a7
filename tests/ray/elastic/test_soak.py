"""A run struck from outside at random, any process of it, killed or stopped, leaves no trace of that."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import ray

from picotron_ray.runtime.ray_cluster import local_ray as lifecycle
from picotron_ray.runtime.ray_cluster import processes
from tests.support.faults.soak import Soak
from tests.support.runs.ray_runs import check_ledger, in_one_process, losses, tiny_job

SHORT = [
    "worker killed",
    "worker stopped",
    "agent killed",
    "coordinator killed",
    "store killed",
    "driver killed",
]

STOPPED = 130


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seconds", "kinds"),
    [
        pytest.param(1.0, SHORT, id="short"),
        pytest.param(float(os.environ.get("SOAK_S", "600")), None, id="long", marks=pytest.mark.slow),
    ],
)
def test_blows_from_outside_leave_no_trace(
    seconds: float, kinds: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    seed = int(os.environ.get("SOAK_SEED", "0"))
    job = tiny_job(
        f"soak-{int(seconds)}",
        tmp_path / "runs",
        steps=10_000_000,
        optimizer={"learning_rate": 3e-4},  # at ten times of it, rounding grows over thousands of steps
        data={"global_batch": 24},
        cluster={"max_workers": 3},
        checkpoint={"interval_steps": 100},
        evaluate={"interval_steps": 10_000_000},
        elastic={"max_failures": 100_000, "max_failures_without_progress": 100, "hang_floor_s": 1.0},
    )
    soak = Soak(job, tmp_path, random.Random(seed))
    try:
        soak.start()
        soak.strike_for(seconds, kinds)
        print(soak.table())
        assert soak.stop() == STOPPED
    finally:
        soak.over.set()
        ray.shutdown()  # a process that stays connected to a Ray that ends is ended by it
        for driver in soak.drivers:
            driver.kill()
            driver.wait()
        left = lifecycle.find(job.name)
        if left is not None:
            lifecycle.stop(left, grace_s=0.0)
    assert left is None, "the driver took Ray down"
    assert processes.members(soak.ray.mark, soak.ray.session) == []
    assert not any(Path(folder).exists() for folder in soak.ray.folders), "no page or slot stays"
    found = losses(job)
    assert found == pytest.approx(in_one_process(job.model_copy(update={"steps": len(found)})), rel=1e-9)
    check_ledger(job)
