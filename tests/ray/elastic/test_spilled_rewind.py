"""A real run that goes back behind its newest commit, its ledger having left the slots for the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.snapshot import ledger_tail
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.runtime.driver.storage_commands import verify_ledger
from picotron_ray.runtime.ray_cluster.names import event_folder
from tests.ray.elastic.test_bad_steps import poisoned_job
from tests.support.runs.ray_runs import ledger, start, storage_of

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(300)]
COMMIT, BAD, STEP_S = 90, 118, 0.1


def spilling_job(folder: Path) -> JobConfig:
    """Snapshots each 20 steps, a commit at 90; step 118 is bad, and that of 80 the newest 30 steps before."""
    job = poisoned_job(folder, (BAD,), rewind_steps=30)
    arguments = {"step_s": STEP_S, "spill_lines": 8}
    model = {"vocab_size": 24, "builder": "spilling_model:slow", "arguments": arguments}
    sections: dict[str, Any] = {
        "model": ModelConfig.model_validate(model),
        "checkpoint": job.checkpoint.model_copy(update={"interval_steps": COMMIT}),
        "snapshot": job.snapshot.model_copy(update={"interval_steps": 20, "slots": 4}),
        "storage": job.storage.model_copy(update={"final_wait_s": 30.0}),
    }
    return job.model_copy(update=sections)


@pytest.mark.deep
@pytest.mark.parametrize("lost", ["nothing", "the disk", "the disk and storage"])
def test_a_rewind_behind_the_newest_commit_is_committed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(ledger_tail, "SPILL_LINES", 256)  # here; the workers' model has its own
    job = spilling_job(tmp_path)
    watched = start(job)
    watched.until(lambda status: status["committed"] == COMMIT)
    folder = event_folder(job.name).with_name("ledger")
    assert list(folder.glob("*/1-8-*")), "a slot behind the commit names it"
    if lost != "nothing":
        shutil.rmtree(folder)
    if lost == "the disk and storage":
        for found in storage_of(job).list("ledger/spilled/"):
            storage_of(job).delete(found.key)
    summary = watched.finish()
    assert summary["status"] == "finished", watched.log()
    (failure,) = summary["failures"]
    assert (failure["kind"], summary["generations"][1]["start_step"]) == ("numerics", 80), watched.log()
    assert not folder.exists()
    lines = ledger(job)
    assert [line["step"] for line in lines] == list(range(1, job.steps + 1))
    report = verify_ledger(job)
    unproven = [line["step"] for line in lines if "unproven" in line]
    assert report["lost"] == summary["ledger"]["lost"] == 12 * len(unproven)
    assert report["ok"] == (not unproven)
    if lost == "the disk and storage":
        assert unproven == list(range(1, len(unproven) + 1)) != []
        assert [event["level"] for event in watched.events if event["kind"] == "ledger"] == ["error"]
    else:
        assert unproven == []
