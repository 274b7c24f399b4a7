"""A real run whose loss becomes NaN: it skips, gives up with the samples' names, and keeps a good state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.shuffle import samples_between
from picotron_ray.layout.shards import as_elements
from picotron_ray.runtime.driver.storage_commands import verify_ledger
from tests.support.runs.ray_runs import ledger, start, storage_of, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400)]
HOPELESS: dict[str, Any] = {
    "steps": 12,
    "precision": "fp32",
    "optimizer": {"learning_rate": 1e30},
    "layout": {"dp": 2, "zero": 2, "micro_batch": 6},
    "cluster": {"max_workers": 2},
    "checkpoint": {"interval_steps": 2},
}


def poisoned_job(folder: Path, bad_steps: tuple[int, ...], **elastic: Any) -> JobConfig:
    """A job whose model finds one sample of each of these steps useless."""
    length, batch, steps = 16, 12, 160
    tokens = np.random.default_rng(0).integers(0, 23, (batch * steps + 40) * length + 1).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    data = {"source": "memmap", "path": str(folder / "tokens.bin"), "sequence_length": length}
    model = {"vocab_size": 24, "builder": "own_models:poisoned", "arguments": {}}
    job = tiny_job(
        "poisoned",
        folder / "runs",
        steps=steps,
        cluster={"max_workers": 2},
        checkpoint={"interval_steps": 10, "keep_last": 20},
        evaluate={"interval_steps": 160, "samples": 4},
        data={**data, "global_batch": batch},
        elastic={"on_nonfinite": "rewind", "rewind_steps": 60, **elastic},
    ).model_copy(update={"model": ModelConfig.model_validate(model)})
    data_set = build_dataset(job.data, 24, job.seed, folder).train
    for step in bad_steps:
        fed = samples_between(job.seed, (step - 1) * batch, step * batch, data_set.samples)
        place = np.flatnonzero(tokens[:-length] == data_set.rows(fed)[4, 0])
        row = data_set.rows(fed)[4]
        (at,) = (p for p in place if np.array_equal(tokens[p : p + length + 1], row))
        tokens[at + 3 : at + 7] = 23
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    return job


@pytest.mark.deep
def test_bad_samples_are_passed_over_from_an_older_commit_and_the_run_finishes(tmp_path: Path) -> None:
    job = poisoned_job(tmp_path, (101, 141))
    watched = start(job)
    summary = watched.finish()
    assert summary["status"] == "finished", watched.log()
    assert [(f["kind"], f["target"]) for f in summary["failures"]] == [
        ("numerics", "step 101"),
        ("numerics", "step 141"),
    ], "one failure each, however many ranks saw it"
    lines = ledger(job)
    passed = [line["step"] for line in lines if "passed_over" in line]
    back = [generation["start_step"] for generation in summary["generations"][1:]]
    assert (back[0] <= 41, back[1] < 101) == (True, True), "60 steps older, which no slot is"
    assert summary["failures"][0]["restored_from"] == "commit"
    assert passed == [*range(min(back) + 1, 142)], (
        "the second one goes behind the first, which stays passed over"
    )
    report = verify_ledger(job)
    assert (report["ok"], report["samples"], report["lost"]) == (True, (160 - len(passed)) * 12, 0)
    assert (report["passed_over"], summary["ledger"]["passed_over"]) == (len(passed) * 12,) * 2
    assert largest(job) < 100


@pytest.mark.deep
def test_one_rewind_too_many_ends_with_3_and_the_samples_of_all(tmp_path: Path) -> None:
    watched = start(poisoned_job(tmp_path, (101, 141), max_rewinds=1))
    summary = watched.finish()
    assert (summary["status"], watched.status["exit_code"]) == ("failed", 3), watched.log()
    assert "step 141 (samples 1680 to 1691): saw loss nan" in summary["detail"]
    assert "to 1211 passed over) non-finite" in summary["detail"]
    assert len(ledger(watched.job)) < 141, "a state from before the bad step is kept"


def largest(job: JobConfig) -> float:
    """The largest absolute value of the newest commit's state."""
    storage = storage_of(job)
    log = RunLog(storage)
    log.refresh()
    good = latest_good(storage, log)
    assert good is not None
    source = CommitSource(storage, good.manifest)
    names = {stored.shard.name for stored in good.manifest.shards}
    pieces = [piece for found in source.pieces(names).values() for piece in found]
    source.prepare(pieces)
    return max(
        float(np.abs(as_elements(source.read(piece), piece.shard).view(piece.shard.dtype)).max())
        for piece in pieces
    )


@pytest.mark.deep
def test_a_run_whose_loss_became_nan_ends_with_3_and_a_state_of_finite_values(tmp_path: Path) -> None:
    """The first update at a rate of 1e30 leaves weights that are finite, and gradients are no more."""
    job = tiny_job("hopeless", tmp_path, **HOPELESS, elastic={"max_skipped_steps": 3})
    watched = start(job)
    summary = watched.finish()
    assert (summary["status"], watched.status["exit_code"]) == ("failed", 3), watched.log()
    assert "step 5 (samples 48 to 59): saw loss" in summary["detail"]
    assert "step 2 (samples 12 to 23) non-finite, step 3 (samples 24 to 35) non-finite" in summary["detail"]
    assert [failure["kind"] for failure in summary["failures"]] == ["numerics"]
    assert len(summary["generations"]) == 1, "it is not tried again"
    assert summary["ledger"] == {
        "samples": 48,
        "lost": 0,
        "repeated": 0,
        "skipped": 36,
        "passed_over": 0,
        "checked": "tokens",
        "wrong": [],
    }
    assert [line.get("skipped") for line in ledger(job)] == [None, *["non-finite"] * 3]
    report = verify_ledger(job)
    assert (report["ok"], report["commit"], report["skipped"]) == (True, 4, 36)
    assert "skipped" in {event["kind"] for event in watched.events}
    assert 1e25 < largest(job) < np.inf

    again = start(job.model_copy(update={"elastic": job.elastic.model_copy(update={"on_nonfinite": "stop"})}))
    assert again.finish()["status"] == "failed"
    assert "on_nonfinite=stop" in again.status["detail"], "it goes on before the bad step"
    assert [line["step"] for line in ledger(job)] == [1, 2, 3, 4]
