"""Runs that adapt while they go on: what was slow is changed, and losses are those of a run that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.runtime.ray_cluster.names import event_folder
from tests.support.runs.ray_runs import check_ledger, losses, run
from tests.support.runs.replays import check_replay

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(900)]
USUAL_S, SLOW_S = 0.02, 0.06
"""Slept per row: a device that computes, on a machine whose cores are shared by all workers."""
LOOP = (
    "telemetry.interval_s=2",
    "adapt.interval_s=2",
    "adapt.settle_steps=15",
    "cluster.start_timeout_s=200",
)


def sleeps(*row_s: float) -> str:
    """Faults by which each rank sleeps so long per row."""
    faults = [
        {"fault": "slow", "target": f"worker:{rank}", "step": 1, "row_s": seconds}
        for rank, seconds in enumerate(row_s)
    ]
    return f"chaos={json.dumps(faults)}"


def trained(storage: Path, name: str, steps: int, *overrides: str) -> tuple[dict[str, Any], list[float]]:
    """Summary and losses of a small run in which sleeping is most of a step."""
    words = [f"name={name}", f"storage.url={storage}", f"steps={steps}", "data.global_batch=24", *LOOP]
    job = load_job("tiny", [*words, *overrides])
    summary = run(job, timeout_s=600)
    check_ledger(job)
    check_replay(event_folder(job.name))
    return summary, losses(job)


def step_s(summary: dict[str, Any]) -> float:
    """Seconds per step of the last generation, by the newest steps of the run."""
    return 24 * 32 / float(summary["tokens_per_s"])


REPLICAS = (
    "layout.dp=4",
    "layout.tp=1",
    "layout.pp=1",
    "layout.zero=0",
    "layout.micro_batch=6",
    "cluster.max_workers=4",
)


def test_a_worker_at_a_third_of_the_speed_costs_little(tmp_path: Path) -> None:
    """Whole rows allow 0.16 s of sleeping (8, 2, 8 and 6 rows); evenly it is 0.36 s."""
    summary, _ = trained(
        tmp_path, "rows", 260, *REPLICAS, "adapt.apply=[rows]", sleeps(USUAL_S, SLOW_S, USUAL_S, USUAL_S)
    )
    assert len(summary["generations"]) == 2
    assert "rows" in summary["generations"][-1]["layout"]
    assert summary["failures"] == []
