"""The event logs that a real run leaves behind replay to identical commands, term by term."""

from __future__ import annotations

from pathlib import Path

import pytest
from replays import check_replay
from runs import run, tiny_job

from picotron_ray.runtime.run import event_folder

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400)]


def test_logs_of_a_run_with_a_dead_worker_and_a_dead_coordinator_replay(tmp_path: Path) -> None:
    faults = (
        {"fault": "kill", "target": "worker:1", "step": 12, "phase": "backward"},
        {"fault": "kill", "target": "coordinator", "step": 30, "phase": "commit"},
        {"fault": "kill", "target": "worker:0", "step": 90, "phase": "sync"},
    )
    job = tiny_job("replayed", tmp_path, steps=120, chaos=faults, checkpoint={"interval_steps": 20})
    summary = run(job)
    assert len(summary["generations"]) >= 3
    assert check_replay(event_folder(job.name)) == 2
