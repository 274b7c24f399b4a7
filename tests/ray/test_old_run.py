"""A run that the tree of 03561a3 left behind goes on: from its newest commit, with the next sample."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import verify_all
from picotron_ray.config.schema.service import StorageConfig

OLD = Path(__file__).resolve().parents[1] / "pure" / "checkpoint" / "old_run"
WAS = "/tmp/old_run"  # where the old tree trained it


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_an_old_run_goes_on(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD, tmp_path / "old_run"))
    for file in (folder / "job.yaml", folder / "runs" / "old-run" / "run.json"):
        file.write_text(file.read_text().replace(WAS, str(folder)))  # it was moved with its data
    words = [str(folder / "job.yaml"), "steps=62", "layout.pp=1", "layout.dp=2", "--json"]
    launch = [sys.executable, "-m", "picotron_ray.launch", *words]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    newest = summary["generations"][-1]
    assert (newest["term"], newest["start_step"], newest["end_step"]) == (3, 60, 62)
    assert summary["ledger"] == {
        "samples": 248,
        "lost": 0,
        "repeated": 0,
        "skipped": 0,
        "passed_over": 0,
        "checked": "tokens",
        "wrong": [],
    }
    storage = open_storage(StorageConfig(url=str(folder / "runs")), "old-run")
    log = RunLog(storage)
    log.refresh()
    assert [(report.step, report.problems) for report in verify_all(storage, log)] == [(62, ()), (60, ())]
