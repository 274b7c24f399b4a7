"""Whole runs whose storage fails: at the end, with the slots kept, and while they restore from a commit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.runtime.ray_cluster.kept_slots import kept_step
from picotron_ray.runtime.ray_cluster.names import run_folder
from picotron_ray.runtime.ray_cluster.placement import kept_on, living_nodes
from tests.support.runs.ray_runs import check_ledger, losses, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.deep, pytest.mark.timeout(400)]


def break_storage(root: Path) -> None:
    """Put a link to itself where the folder was: nobody can read or write below it, and it may get better."""
    root.rename(root.with_suffix(".away"))
    root.symlink_to(root.name)


def mend_storage(root: Path) -> None:
    root.unlink()
    root.with_suffix(".away").rename(root)


def test_a_state_that_storage_does_not_take_is_committed_by_the_next_launch(tmp_path: Path) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    job = tiny_job("final-wait", root, steps=25, cluster={"max_workers": 2})
    job = job.model_copy(update={"storage": job.storage.model_copy(update={"final_wait_s": 3.0})})
    folder = run_folder(job.snapshot.folder, job.name)
    first = start(job)
    first.until(lambda status: (status["committed"] or 0) >= 10, 90)
    break_storage(root)
    ended = first.until(lambda status: status["done"], 60)
    assert (ended["state"], ended["exit_code"]) == ("storage", 4), first.log()
    told = [event["text"] for event in first.events if event["kind"] == "storage-wait"]
    assert any("step 25 is not committed yet" in text and "trying for another 3 s" in text for text in told)
    assert kept_step([folder]) == 25
    assert not list(folder.glob("*/*.page")), "nothing else is kept"
    assert list(kept_on(living_nodes(), job.name, job.snapshot.folder, False).values()) == [25]
    first.finish()
    mend_storage(root)
    second = start(job)
    summary = second.finish(100)
    assert summary["status"] == "finished", second.log()
    assert not folder.exists()
    assert [entry["start_step"] for entry in summary["generations"][1:]] == [], "nothing was trained again"
    assert len(losses(job)) == 25
    check_ledger(job)


def test_an_outage_while_restoring_from_a_commit_is_no_failure(tmp_path: Path) -> None:
    job = tiny_job(
        "restore-wait",
        tmp_path,
        steps=20,
        cluster={"max_workers": 2},
        elastic={"first_step_timeout_s": 8.0, "max_failures_without_progress": 1},
    )
    first = start(job)
    first.until(lambda status: (status["committed"] or 0) >= 10)
    first.coordinator.request.remote("stop")
    stopped = first.finish()
    chunks = tmp_path / job.name / "chunks"
    second = start(job.model_copy(update={"steps": 40}))
    second.until(lambda status: any(event["kind"] == "join" for event in second.events))
    break_storage(chunks)  # the coordinator has read them; the workers are still starting

    def all_wait(status: dict[str, Any]) -> bool:
        pages = [page for page in status["pages"].values() if page["worker"] in status["members"]]
        return len(pages) == 2 and all(page["phase"] == "storage" for page in pages)

    second.until(all_wait)
    time.sleep(20.0)
    assert all_wait(second.look()), second.log()
    mend_storage(chunks)
    summary = second.finish()
    assert (summary["status"], summary["failures"]) == ("finished", []), second.log()
    assert [entry["start_step"] for entry in summary["generations"]] == [0, stopped["steps"]]
    check_ledger(job)


@pytest.mark.parametrize(("steps", "mended"), [(25, True), (40, False)])
def test_a_relaunch_takes_up_what_an_agent_guards_that_could_not_mark_it(
    steps: int, mended: bool, tmp_path: Path
) -> None:
    """The agent outlives its run then: the next launch greets it, and may train on in its folder."""
    root = tmp_path / "storage"
    root.mkdir()
    patient = {"cluster": {"max_workers": 2, "start_timeout_s": 240.0}, "elastic": {"node_timeout_s": 60.0}}
    job = tiny_job("unmarked", root, steps=25, **patient)
    job = job.model_copy(update={"storage": job.storage.model_copy(update={"final_wait_s": 3.0})})
    first = start(job)
    first.until(lambda status: (status["committed"] or 0) >= 10)
    (node,) = run_folder(job.snapshot.folder, job.name).iterdir()
    spoiled = node / "kept.json.new"
    spoiled.mkdir()
    for room in node.glob("reserved.*"):
        room.unlink()
    break_storage(root)
    ended = first.until(lambda status: status["done"])
    assert (ended["state"], ended["exit_code"]) == ("storage", 4), first.log()
    assert "its snapshots are not all marked as kept" in ended["detail"]
    assert kept_step([node.parent]) is None
    assert list(node.glob("*.slot")), "the agent lives, and guards them"
    first.finish()
    mend_storage(root)
    if mended:
        spoiled.rmdir()
    second = start(job.model_copy(update={"steps": steps}))
    summary = second.finish()
    assert summary["status"] == "finished", second.log()
    assert not node.exists()
    went_on = [entry["start_step"] for entry in summary["generations"][1:]]
    assert went_on[:1] == ([] if steps == 25 else [25]), "nothing was trained again"
    assert went_on == sorted(went_on), "it may grow later"
    assert len(losses(job)) == steps
    check_ledger(job)
