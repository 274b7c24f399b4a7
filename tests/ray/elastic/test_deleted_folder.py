"""A snapshot folder that somebody deletes while the run trains in it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from picotron_ray.runtime.ray_cluster.names import run_folder
from tests.support.runs.ray_runs import check_ledger, start, tiny_job

pytestmark = pytest.mark.usefixtures("connected")


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_run_goes_on_from_the_snapshots_of_a_folder_that_was_deleted(tmp_path: Path) -> None:
    """Seen: nothing was told, recovered or committed any more, while workers trained on unseen."""
    job = tiny_job("deleted-folder", tmp_path, steps=4000, checkpoint={"interval_steps": 2000})
    watched = start(job)
    reached = watched.until(lambda status: status["step"] >= 30)["step"]
    assert reached < 2000, "nothing is committed yet"
    folder = run_folder(job.snapshot.folder, job.name)
    shutil.rmtree(folder)
    watched.until(lambda status: len(status["pages"]) > 0 and watched.log().count("generation 1.2") > 0)
    [told] = [
        event["text"] for event in watched.events if "was deleted while the run uses it" in event["text"]
    ]
    assert str(folder) in told
    assert "is made anew" in told
    assert "from host memory of step" in watched.log(), "not from its beginning"
    folders = [folder, *folder.iterdir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped", watched.log()
    assert summary["steps"] > reached
    assert all(failure["lost_steps"] <= 2 for failure in summary["failures"]), summary["failures"]
    assert not folder.exists()
    check_ledger(job)


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_where_the_folder_cannot_be_made_its_workers_train_on(tmp_path: Path) -> None:
    """Seen: the coordinator missed them, and killed them after ``elastic.node_timeout_s``."""
    job = tiny_job("deleted-for-long", tmp_path, steps=1_000_000, checkpoint={"interval_steps": 500_000})
    watched = start(job)
    watched.until(lambda status: status["step"] >= 30)
    folder = run_folder(job.snapshot.folder, job.name)
    shutil.rmtree(folder)
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs")
    try:
        told = watched.until(lambda _: "training goes on" in watched.log())
        until = time.monotonic() + job.elastic.node_timeout_s + 5.0
        status = watched.until(lambda _: time.monotonic() > until)
        assert status["step"] > told["step"], "its workers are seen, and so is what they do"
        assert len(status["pages"]) == len(told["pages"]) > 0
        assert "generation 1.2" not in watched.log()
    finally:
        folder.unlink()
    watched.until(lambda _: "from host memory of step" in watched.log())
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped", watched.log()
    assert [failure["kind"] for failure in summary["failures"]] == ["worker-exited"], summary["failures"]
    assert all(failure["lost_steps"] <= 2 for failure in summary["failures"]), summary["failures"]
    check_ledger(job)
