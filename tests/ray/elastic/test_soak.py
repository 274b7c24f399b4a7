"""Minutes of SIGKILL and SIGSTOP from outside, to every kind of process: nothing shows in the numbers.

``SOAK_S`` is the length in seconds (600), ``SOAK_SEED`` draws the signals (0).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from picotron_ray.runtime.ray_cluster.names import ledger_folder, run_folder
from tests.support.runs.ray_runs import check_ledger, in_one_process, losses, tiny_job
from tests.support.runs.soak import Soak, soaked

if TYPE_CHECKING:
    from picotron_ray.runtime.ray_cluster.local_ray import LocalRay

SECONDS = float(os.environ.get("SOAK_S", "600"))


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
@pytest.mark.timeout(4 * SECONDS + 600)
def test_signals_to_every_kind_of_process_leave_no_trace(local_ray: LocalRay, tmp_path: Path) -> None:
    job = tiny_job(
        "soak", tmp_path / "storage", steps=1_000_000, cluster={"max_workers": 3},
        checkpoint={"interval_steps": 100}, evaluate={"interval_steps": 1_000_000},
        elastic={"max_failures": 10_000, "max_failures_without_progress": 50},
        optimizer={"learning_rate": 3e-4},  # so that rounding does not grow over thousands of steps
        data={"global_batch": 48},
    )  # fmt: skip
    seed = int(os.environ.get("SOAK_SEED", "0"))
    soak = Soak.begin(job, local_ray.address, tmp_path, seed)
    summary = soaked(soak, SECONDS)
    print(f"{SECONDS:g} s, seed {seed}, {summary['steps']} steps, {len(summary['failures'])} failures")
    print(soak.table())
    assert summary["status"] == "stopped"
    assert soak.costs == [], "an agent's death costs no step"
    found = losses(job)
    assert len(found) == summary["steps"]
    calm = in_one_process(job.model_copy(update={"steps": len(found)}))
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, calm, strict=True))
    print(f"largest relative difference of a loss: {worst:.1e}")
    assert worst < 1e-9
    check_ledger(job)
    until = time.monotonic() + 30
    while soak.left() and time.monotonic() < until:
        time.sleep(0.2)
    assert soak.left() == []
    assert not run_folder(job.snapshot.folder, job.name).exists()
    assert not ledger_folder(job.name).exists()
