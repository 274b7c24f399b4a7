"""A run whose curriculum decides, through three kills: data show prints what the ledger says was fed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.runtime.driver.data_commands import show_step
from picotron_ray.runtime.driver.storage_commands import verify_ledger
from tests.support.runs.ray_runs import ledger, run, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400)]
STEPS, SHOWN = 120, 100
KILLS = tuple({"fault": "kill", "target": "worker:0", "step": step} for step in (20, 45, 90))
CURRICULUM: dict[str, Any] = {
    "advance": "auto",
    "performance": 1e-3,
    "adaptation": 1e-6,
    "window_steps": 5,
    "stages": [
        {"name": "basic", "difficulty": 0.1, "steps": 100},
        {"name": "short", "difficulty": 0.5, "steps": 30, "sequence_length": 4},
        {"name": "all", "steps": 1},
    ],
}


@pytest.mark.deep
def test_shown_steps_are_those_that_were_fed(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for at in range(60):
        words = f"text {at} of many, each of which says {at * at} more. " * (1 + at % 7)
        (tmp_path / "text" / f"{at}.txt").write_text(words)
    data = {"source": "text", "path": str(tmp_path / "text"), "batching": "packed", "long_documents": "split"}
    job = tiny_job(
        "fed-rows", tmp_path / "runs", steps=STEPS, chaos=KILLS, model={"vocab_size": 260},
        data={**data, "curriculum": CURRICULUM}, checkpoint={"interval_steps": 40},
        cluster={"max_workers": 3},
    )  # fmt: skip
    summary = run(job, timeout_s=300)
    assert summary["status"] == "finished"
    assert len(summary["generations"]) > 3
    lines = ledger(job)
    assert len(lines[-1]["stages"]) > 1, "a stage was decided"
    for step in random.Random(1).sample(range(1, STEPS + 1), SHOWN):
        found = show_step(job, step)
        assert found["ledger"] == "the same: all digests are those of these rows", step
        assert found["stage"] == len(lines[step - 1]["stages"])
        shares = [show_step(job, step, rank)["samples"] for rank in range(2)] if step < 10 else []
        assert not shares or shares[0][0] == found["samples"][0]
    report = verify_ledger(job)
    assert (report["ok"], report["lost"], report["wrong"]) == (True, 0, [])
