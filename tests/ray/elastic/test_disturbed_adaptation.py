"""The adaptation loop when it is disturbed: its coordinator dies, or its run is stopped, within a trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.support.runs.adapting_runs import adapting_job, decided, ended, sleeps
from tests.support.runs.ray_runs import kill, start

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400), pytest.mark.deep]
UNEVEN = (
    *(
        "data.global_batch=12",
        "cluster.max_workers=2",
        "adapt.apply=[rows]",
        "adapt.settle_steps=40",
        "steps=180",
    ),
    *("layout.dp=2", "layout.tp=1", "layout.pp=1", "layout.zero=0", "layout.micro_batch=3"),
)
SPEEDS = sleeps(0.005, 0.02)
"""Of two replicas, one at a quarter of the speed: rows are shared out anew, and that is on trial for long."""


def test_a_trial_goes_on_under_the_next_coordinator(tmp_path: Path) -> None:
    watched = start(adapting_job(tmp_path, "adopted-trial", *UNEVEN, chaos=SPEEDS))
    watched.until(
        lambda status: status["generation"] == "1.2" and decided("apply")({"events": watched.events})
    )
    pid = ray.get(watched.coordinator.pid.remote())
    kill(pid)
    watched.events.clear()
    watched.until(lambda status: status["term"] == 2)
    run = ended(watched)
    assert run.summary["failures"] == []
    assert run.decisions[:2] == [("apply", "rows"), ("kept", "rows")]
    assert [(one["term"], one["n"]) for one in run.summary["generations"]][:2] == [(1, 1), (1, 2)]
    assert "rows" in run.layouts[-1]


def test_a_run_that_is_stopped_within_a_trial_goes_on(tmp_path: Path) -> None:
    job = adapting_job(tmp_path, "stopped-trial", *UNEVEN, chaos=SPEEDS)
    watched = start(job)
    watched.until(
        lambda status: status["generation"] == "1.2" and decided("apply")({"events": watched.events})
    )
    before = watched.look()["layout"]
    watched.coordinator.request.remote("stop")
    assert watched.finish()["status"] == "stopped"
    run = ended(start(job))
    assert run.summary["failures"] == []
    assert "rows" in before
    assert ("void", "rows") in run.decisions, "it was not judged"
    assert "rows" not in run.layouts[2], "its workers are others now, as fast as each other"
