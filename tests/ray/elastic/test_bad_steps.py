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
    assert summary["ledger"] == {"samples": 48, "lost": 0, "repeated": 0, "skipped": 36}
    assert [line.get("skipped") for line in ledger(job)] == [None, *["non-finite"] * 3]
    report = verify_ledger(job)
    assert (report["ok"], report["commit"], report["skipped"]) == (True, 4, 36)
    assert "skipped" in {event["kind"] for event in watched.events}
    assert 1e25 < largest(job) < np.inf

    again = start(job.model_copy(update={"elastic": job.elastic.model_copy(update={"on_nonfinite": "stop"})}))
    assert again.finish()["status"] == "failed"
    assert "on_nonfinite=stop" in again.status["detail"], "it goes on before the bad step"
    assert [line["step"] for line in ledger(job)] == [1, 2, 3, 4]
