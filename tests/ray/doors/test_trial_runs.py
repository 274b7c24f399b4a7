"""Runs of trials in storage, without a cluster: room given back, full disks, and what had ended already."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import StorageError
from tests.support.fake_trial import FakeTrial
from tuning.errors import StudyStorageError, TrialFailedError

FULL = "OSError: [Errno 28] No space left on device"


def job_in(folder: Path) -> JobConfig:
    return parse_job({"name": "tiny", "steps": 9, "storage": {"url": str(folder)}})


def run_of(folder: Path, trial: str, **summary: Any) -> set[str]:
    """Objects of a run, which is made if it is not there; ``summary``: it has ended so."""
    (folder / "s/runs").mkdir(parents=True, exist_ok=True)
    run = open_storage(parse_job({"storage": {"url": str(folder / "s/runs")}}).storage, f"s.{trial}")
    if not (folder / f"s/runs/s.{trial}").exists():
        for key in ("chunks/ab/abc", "manifests/9-1-1.json", "log/00000001.json", "run.json"):
            run.put(key, b"{}")
    if summary:
        run.put("summary.json", json.dumps(summary).encode())
    return {entry.key for entry in run.list("")}


def test_trials_that_ended_give_back_their_commits_and_no_others_do(tmp_path: Path) -> None:
    from tuning.trial_runs import GivenBack

    for name in ("done", "full", "runs"):
        run_of(tmp_path, name, **({"status": "finished"} if name == "done" else {}))
    run_of(tmp_path, "late")
    back = GivenBack(job_in(tmp_path), "s")
    back.setup()
    done = FakeTrial("done", {}, "TERMINATED", {"finished": True})
    full = FakeTrial("full", {}, "ERROR", error=FULL)
    late = FakeTrial("late", {}, "TERMINATED", {"done": True})
    back.on_trial_complete(1, [], done)
    back.on_trial_error(1, [], full)
    back.on_trial_complete(1, [], late)
    time.sleep(0.2)
    assert "chunks/ab/abc" in run_of(tmp_path, "late"), "its run has yet to stop"
    run_of(tmp_path, "late", status="stopped")
    back.on_experiment_end([])
    assert run_of(tmp_path, "done") == run_of(tmp_path, "late") == {"run.json", "summary.json"}
    assert len(run_of(tmp_path, "full")) == len(run_of(tmp_path, "runs")) == 4, "they go on from there"


def test_a_full_disk_ends_the_study_and_an_out_of_memory_error_only_its_trial() -> None:
    from tuning.trial_rows import row_of, storage_failed
    from tuning.trial_runs import StorageWatch

    watch = StorageWatch()
    memory = FakeTrial("m", {}, "ERROR", error="x\ntuning.errors.TrialFailedError: out of memory in worker 0")
    watch.on_trial_error(1, [memory], memory)
    assert row_of(memory)["reason"] == "out of memory in worker 0"
    for error in (FULL, "x\ntuning.errors.StudyStorageError: /data: full"):
        trial = FakeTrial("t", {}, "ERROR", error=error)
        assert storage_failed(trial)
        with pytest.raises(StudyStorageError, match="trial t: "):
            watch.on_trial_error(1, [trial], trial)


def test_a_run_that_had_ended_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train.v2.api.exceptions import ControllerError

    from tuning import trial
    from tuning.trial_reports import TrialReports

    class Trainer:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def fit(self) -> Any:
            raise ControllerError(StorageError("/data: full"))

    monkeypatch.setattr(trial, "ElasticTrainer", Trainer)
    raw = job_in(tmp_path).model_dump(mode="json") | {"name": "s.t"}
    job = parse_job({**raw, "storage": {"url": str(tmp_path / "s/runs")}})
    assert trial._ended(job) == {}
    run_of(tmp_path, "t", status="stopped", steps=4, final_loss=3.0)
    assert trial._ended(job) == {}, "it goes on"
    run_of(tmp_path, "t", status="finished", steps=9, final_loss=2.0)
    assert trial._ended(job)["loss"] == 2.0
    run_of(tmp_path, "t", status="failed", steps=4, detail="out of memory")
    with pytest.raises(TrialFailedError, match="out of memory"):
        trial._ended(job)
    with pytest.raises(StudyStorageError, match="/data: full"):
        trial._fitted(job, TrialReports(dict, (), 9))


def test_a_study_that_goes_on_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from picotron_ray.runtime.run_storage.life_sign import Life, Process, ProcessSpace, this_space
    from tuning import trial_runs

    asked: list[str] = []
    monkeypatch.setattr(trial_runs, "await_silence", lambda run, *_: asked.append(run))
    job = job_in(tmp_path)
    trial_runs.refuse_elsewhere(job, "s", Console())
    for name, summary in (("a", {"status": "finished"}), ("b", {})):
        run_of(tmp_path, name, **summary)
    trial_runs.refuse_elsewhere(job, "s", Console())
    assert asked == [], "none has a sign of life"
    none = Process(0, "")
    for machine, expected in ((this_space(), []), (ProcessSpace("far", "1", "2"), ["s.b"])):
        life = Life(1, 1, "", machine, none, none, "", "", 1.0)
        monkeypatch.setattr(trial_runs, "newest_life", lambda storage, life=life: life)
        trial_runs.refuse_elsewhere(job, "s", Console())
        assert asked == expected
