"""Whose curve lies in a folder: another run's is never emptied, an earlier one's of the name is kept."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.service import TrackerConfig
from picotron_ray.errors import ConfigError
from picotron_ray.observability.remote_trackers import open_tracker
from picotron_ray.observability.tracker_owner import OWNER, take_folder
from picotron_ray.observability.trackers import check_trackers
from picotron_ray.runtime.coordinator.trackers import Tracking

LINE = {
    "step": 1, "term": 1, "n": 1, "samples": [0, 8], "tokens": 128, "loss": 2.0, "grad_norm": 0.5,
    "learning_rate": 1e-3, "at_s": 1.0,
}  # fmt: skip


def tracked(folder: Path, run: str, identity: str, steps: int) -> list[str]:
    """Let a coordinator begin anew and write so many steps; returns what it noted."""
    notes: list[str] = []
    executor = ThreadPoolExecutor(1)
    lines = [{**LINE, "step": step} for step in range(1, steps + 1)]
    store: Any = SimpleNamespace(
        identity=identity, committer=executor, ledger_lines=lambda after: lines[after:]
    )
    record: Any = SimpleNamespace(
        measured=lambda: SimpleNamespace(evaluations={}), note=lambda level, kind, text: notes.append(text)
    )
    job = load_job("tiny", [f"name={run}", f"trackers=[{{kind: csv, folder: {folder}}}]"])
    tracking = Tracking(job, store, record, folder.parent / "events" / "log")
    for work in (lambda: tracking._rewind(0), tracking._catch_up, tracking._close):
        done = tracking._submit(work)
        assert done is not None
        done.exception()
    executor.shutdown()
    return notes


def rows(folder: Path) -> int:
    return len((folder / "steps.csv").read_text().splitlines()) - 1


def test_another_runs_curve_is_refused_by_name_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "curves"
    assert tracked(folder, "first", "a", 9) == []
    assert rows(folder) == 9
    notes = tracked(folder, "second", "b", 4)
    assert rows(folder) == 9
    assert notes
    assert all("holds the curve of run 'first'" in note for note in notes)
    configs = [TrackerConfig(kind="csv", folder=str(folder))]
    with pytest.raises(ConfigError) as caught:
        check_trackers(configs, "second")
    (line,) = caught.value.problems
    assert line.startswith(f"trackers.0.folder: saw '{folder}', which holds the curve of run 'first'; name")
    check_trackers(configs, "first")


def test_a_name_begun_anew_moves_the_earlier_curve_aside(tmp_path: Path) -> None:
    folder = tmp_path / "curves"
    assert tracked(folder, "night", "a", 9) == []
    assert tracked(folder, "night", "a", 10) == [], "the same run"
    (note,) = tracked(folder, "night", "b", 4)
    assert note.endswith(f"was moved to {folder / 'earlier-1'}")
    assert (rows(folder), rows(folder / "earlier-1")) == (4, 10)
    (note,) = tracked(folder, "night", "c", 1)
    assert (rows(folder), rows(folder / "earlier-2")) == (1, 4)


def test_files_of_before_there_were_owners_are_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step\n1\n")
    (tmp_path / OWNER).write_text("cut sh")
    assert take_folder(tmp_path, "night", "a") == ""
    assert (tmp_path / "steps.csv").exists()


def test_a_name_begun_anew_is_another_run_at_weights_and_biases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids: list[str] = []
    library = SimpleNamespace(Settings=lambda **_: None, init=lambda **options: ids.append(options["id"]))
    monkeypatch.setitem(sys.modules, "wandb", library)
    for identity in ("a" * 32, "a" * 32, "b" * 32):
        take_folder(tmp_path, "night", identity)
        open_tracker(TrackerConfig(kind="wandb"), "night", {}, tmp_path, identity)
    assert ids == ["night-aaaaaaaa", "night-aaaaaaaa", "night-bbbbbbbb"]
