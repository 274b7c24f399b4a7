"""Formats that outlive a process are read as earlier versions wrote them; a newer one's are refused.

``formats/<commit>/`` holds one object of each, as the tree of that commit wrote it; ``old_run`` a whole run
of an older one. A format that changes gets another folder, and these stay. docs/upgrades.md lists them.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.checkpoint.snapshot.slot_reader import verify
from picotron_ray.checkpoint.storage.base import decode_json, encode_json
from picotron_ray.checkpoint.store.upload_part import decode_part
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.planner.calibration_history import CalibrationHistory
from picotron_ray.runtime.coordinator.event_log.files import decode_record
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.driver.console import summary_lines
from picotron_ray.runtime.ray_cluster import kept_slots
from tests.support.checkpoint.checkpoint_kit import make_state

HERE = Path(__file__).parent
OLD = HERE / "old_run"
VERSIONS = sorted(path for path in (HERE / "formats").iterdir() if path.is_dir())
UPGRADES = HERE.parents[2] / "docs" / "upgrades.md"


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def version(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_a_snapshot_slot(version: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.slot"
    path.write_bytes(gzip.decompress((version / "w.slot.gz").read_bytes()))
    view = verify(path)
    assert (view.header.term, view.header.n, view.header.step) == (1, 2, 3)
    assert {shard.shard.name for shard in view.shards} == set(make_state(0))


def test_a_part_of_an_upload(version: Path) -> None:
    part = decode_part((version / "part.json").read_bytes())
    assert (part.term, part.n, part.step) == (1, 2, 3)
    assert len(part.shards) == len(make_state(0))


def test_an_intent(version: Path) -> None:
    found = decode_json("intent", (version / "intent.json").read_bytes())
    assert (found["chunks"], found["obeyed"]) == (["a" * 64], ["condemned/1.json"])


def test_the_record_of_a_run(version: Path) -> None:
    """A coordinator of today goes on from what one of then knew; nobody had paused or resized its run."""
    memo = decode_record((version / "record.json").read_bytes())
    assert memo is not None
    record = RunRecord(JobConfig.model_validate({"name": "small", "data": {"global_batch": 8}}))
    record.recall(memo, (), memo["launch"])
    assert record.past()["standing"] == m.NO_ORDERS
    summary = record.summary(m.Finish("finished"))
    assert [failure["kind"] for failure in summary["failures"]] == ["worker-exited"]
    assert [(entry["term"], entry["n"]) for entry in summary["generations"]] == [(1, 1), (1, 2)]
    assert summary["paused_s"] == 0.0
    again = RunRecord(JobConfig.model_validate({"name": "small"}))
    again.recall(json.loads(json.dumps(record.memo())), (), memo["launch"])
    assert again.summary(m.Finish("finished"))["failures"] == summary["failures"]


def test_a_summary(version: Path) -> None:
    summary = json.loads((version / "summary.json").read_text())
    assert summary_lines(summary)[0].startswith("run small finished")


def test_a_marker_of_kept_slots(version: Path, tmp_path: Path) -> None:
    shutil.copy(version / "kept.json", tmp_path / kept_slots.MARKER)
    marker = kept_slots.read_marker(tmp_path)
    assert marker is not None
    assert (marker["slots"], marker["run"]) == ({"w.slot": 3}, "run-identity")


def test_measures_of_a_cluster(version: Path) -> None:
    history = CalibrationHistory.model_validate_json((version / "calibration.json").read_text())
    assert [measure.step_s for measure in history.measures] == [0.5]


def test_every_object_has_a_test_and_a_row_in_the_docs(version: Path) -> None:
    named = set(re.findall(r'version / "([\w.]+)"', Path(__file__).read_text()))
    assert {path.name for path in version.iterdir()} == named
    text = UPGRADES.read_text()
    assert [name for name in named if f"`{name.removesuffix('.gz')}`" not in text] == []


# --- a newer version ------------------------------------------------------------------------------------


def newer(folder: Path) -> Path:
    """A copy of the old run whose newest log entry a newer version wrote."""
    copy = Path(shutil.copytree(OLD, folder / "old_run"))
    path = copy / "runs" / "old-run" / "log" / "00000009.json"
    value: dict[str, Any] = {**json.loads(path.read_text()), "schema": 2}
    del value["digest"]
    path.write_bytes(encode_json({**value, "digest": blake3(encode_json(value)).hexdigest()}))
    return copy


@pytest.mark.parametrize("words", [("checkpoints", "ls"), ("checkpoints", "verify"), ("ledger", "verify")])
def test_a_run_of_a_newer_schema_is_refused_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    copy = newer(tmp_path)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    places = [f"storage.url={copy / 'runs'}", f"data.path={copy / 'text.jsonl'}"]
    done = CliRunner().invoke(cli.app, [*words, str(OLD / "job.yaml"), *places])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert "log/00000009.json has schema 2, this version reads 1" in line
    assert "launch it with that version" in line
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
