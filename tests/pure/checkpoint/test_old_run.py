"""A run that the tree of 03561a3 left behind: everything in its folder is read as before.

``old_run`` holds two launches of one run (see its job.yaml): a pipeline that was killed once, then replicas
with ZeRO-1 that went on from its commit; a third commit retired the first.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger, verify_all
from picotron_ray.config.load import load_job
from picotron_ray.config.resume import changes
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.coordinator.codec import decode_spec
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.trackers import STEP_KEYS, CsvTracker

OLD = Path(__file__).parent / "old_run"
JOB = str(OLD / "job.yaml")
KINDS = ["term", "generation", "commit", "generation", "commit", "term", "generation", "commit", "retire"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the run's folder: some readers may write, and no test may change what is kept."""
    return Path(shutil.copytree(OLD, tmp_path / "old_run"))


@pytest.fixture
def storage(folder: Path) -> Storage:
    return open_storage(StorageConfig(url=str(folder / "runs")), "old-run")


@pytest.fixture
def log(storage: Storage) -> RunLog:
    log = RunLog(storage)
    log.refresh()
    return log


def test_log(log: RunLog) -> None:
    assert log.complaints() == []
    assert [entry.kind for entry in log.entries()] == KINDS
    assert [entry.body["step"] for entry in log.commits()] == [40, 60]


def test_generations(log: RunLog) -> None:
    specs = [decode_spec(entry.body["spec"]) for entry in log.entries() if entry.kind == "generation"]
    assert [(spec.id.term, spec.id.n, spec.resume_step) for spec in specs] == [
        (1, 1, 0),
        (1, 2, 29),
        (2, 1, 40),
    ]
    assert [spec.source.kind for spec in specs] == ["init", "slots", "commit"]
    assert [(spec.layout.pp, spec.layout.dp, spec.layout.zero) for spec in specs] == [
        (2, 1, 0),
        (2, 1, 0),
        (1, 2, 1),
    ]


def test_commits_verify_chunk_by_chunk(storage: Storage, log: RunLog) -> None:
    reports = list(verify_all(storage, log))
    assert [(report.step, report.problems) for report in reports] == [(60, ()), (40, ())]
    for report in reports:
        assert report.manifest is not None
        assert len(report.manifest.tensors()) == 63
        assert Layout.from_dict(report.manifest.layout).to_dict().keys() >= report.manifest.layout.keys()


def test_a_damaged_chunk_is_noticed(storage: Storage, log: RunLog, folder: Path) -> None:
    good = latest_good(storage, log)
    assert good is not None
    address = next(iter(good.manifest.chunks))
    chunk = folder / "runs" / "old-run" / "chunks" / address[:2] / address
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (newest, before) = verify_all(storage, log)
    assert newest.bad_chunks == (address,)
    assert before.problems == ()


def test_ledger(storage: Storage, log: RunLog) -> None:
    good = latest_good(storage, log)
    assert good is not None
    lines = [json.loads(line) for line in read_ledger(storage, good.manifest)]
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[-1]["samples"] == [236, 240]


NEW_DEFAULTS = [
    ("kernels.projections", "separate", "auto"),
    ("kernels.tp_overlap", "none", "auto"),
    ("kernels.loss", "logits", "auto"),
    ("kernels.compile", False, "auto"),
]
"""What auto comes to on CPUs is what the run was started with."""


def test_its_config_says_the_same(storage: Storage) -> None:
    saved = json.loads(storage.get("run.json"))["config"]
    assert changes(saved, load_job(JOB)) == NEW_DEFAULTS
    assert changes(saved, load_job(JOB, ["seed=1"])) == [("seed", 0, 1), *NEW_DEFAULTS]


def test_summary(storage: Storage) -> None:
    summary = json.loads(storage.get("summary.json"))
    assert (summary["status"], summary["steps"], summary["ledger"]["samples"]) == ("finished", 60, 240)
    assert [failure["kind"] for failure in summary["failures"]] == ["worker-exited"]


def test_trackers_go_on(folder: Path) -> None:
    """A tracker finds the last step that it wrote, and adds the next one."""
    tracker = CsvTracker(folder / "trackers")
    assert (tracker.last_step, tracker.last_eval_step) == (60, 60)
    tracker.write([dict.fromkeys(STEP_KEYS, 0) | {"step": 61}], [])
    with (folder / "trackers" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 62))
    assert list(rows[0]) == list(STEP_KEYS)


def call(folder: Path, *words: str) -> Any:
    """A command on the copy, in JSON; the commands see storage and data where the copy is."""
    places = [f"storage.url={folder / 'runs'}", f"data.path={folder / 'text.jsonl'}"]
    done = CliRunner().invoke(cli.app, [*words, JOB, *places, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_commands_read_it(folder: Path) -> None:
    assert [row["step"] for row in call(folder, "checkpoints", "ls")] == [40, 60]
    assert [row["problems"] for row in call(folder, "checkpoints", "verify")] == [[], []]
    found = call(folder, "ledger", "verify")
    assert (found["steps"], found["lost"], found["repeated"], found["wrong"]) == (60, 0, 0, [])


def test_a_second_launch_is_compared_with_it(folder: Path) -> None:
    storage = [f"storage.url={folder / 'runs'}"]
    done = CliRunner().invoke(cli.app, ["validate", JOB, *storage, "--resume", "--json"])
    *defaults, line, unread = json.loads(done.stdout)["changed"]
    assert [text.split(":")[0] for text in defaults] == [key for key, *_ in NEW_DEFAULTS]
    assert line.startswith("storage.url: was '/tmp/old_run/runs', now ")
    assert "cannot read /tmp/old_run/text.jsonl" in unread, "the data of then is not here"
    refused = CliRunner().invoke(cli.app, ["validate", JOB, *storage, "model.layers=3", "--resume", "--json"])
    assert refused.exit_code == 2
    assert "model.layers: was 2, now 3" in json.loads(refused.stdout)["error"]
