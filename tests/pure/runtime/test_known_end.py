"""Commands for a run that goes on, asked of one that is over: they say how it ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.config.load import load_job
from picotron_ray.errors import NotRunningError
from picotron_ray.runtime.driver.known_end import end_words, in_place_of
from picotron_ray.runtime.run_storage.stored_run import CUT_OFF, StoredRun, Vitals
from tests.support.runs.remembered import remember
from tests.support.runs.stored_runs import STEPS, make, sign


@pytest.fixture
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a run that was launched on this machine and has ended."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = make(tmp_path, "night", finished=True)
    remember(load_job("tiny", ["name=night", f"storage.url={folder.parent}"]), "a", finished=True)
    for record in (folder / "records").iterdir():
        os.utime(record, (time.time() - 100,) * 2)
    sign(folder, time.time() - 100, ended="stopped")
    return folder


ASKED = [
    ("top", "night", "--once"),
    ("alerts", "ls", "night"),
    ("debug", "deadlock", "night"),
    ("pause", "night"),
    ("resize", "night", "2"),
    ("nodes", "night"),
    ("profile", "night"),
    ("checkpoint-now", "night"),
]


@pytest.mark.parametrize("words", ASKED, ids=lambda words: words[0])
def test_a_run_that_is_over_is_told_from_one_that_never_was(over: Path, words: tuple[str, ...]) -> None:
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2, said.output
    [line] = said.stderr.splitlines()
    assert line.startswith(f"error: run 'night' stopped at step {STEPS}, 1 min 4")
    assert line.endswith("see `picotron-ray report night`, `logs night` or `dashboard night`")
    typo = CliRunner().invoke(app, ["nihgt" if word == "night" else word for word in words])
    assert typo.exit_code == 2
    assert typo.stderr.startswith("error: run: saw 'nihgt', which does not run on this machine")
    assert typo.stderr.endswith("did you mean 'night'?\n")


def test_how_a_run_ended() -> None:
    def words(state: str, updated_s: float = 1000.0) -> str:
        run = StoredRun("night", "here", Vitals(state, updated_s), {}, {}, summary={"steps": 7})
        return end_words(run, 1090.0).partition("; see")[0]

    assert words("finished") == "run 'night' finished at step 7, 1 min 30 s ago"
    assert words("stopped", 1050.0) == "run 'night' stopped at step 7, 40 s ago"
    assert words("storage") == "run 'night' ended for want of storage at step 7, 1 min 30 s ago"
    assert "died without an end at step 7: its newest sign of life was 1 min 30 s ago" in words(CUT_OFF)
    assert "died since, or goes on elsewhere" in words("running")
    assert words("starting", 0.0).endswith("its storage says starting")


def test_storage_that_does_not_tell_is_said(over: Path) -> None:
    (over / "run.json").unlink()
    error = NotRunningError("run: saw 'night', which does not run")
    assert str(in_place_of(error)) == str(error), "its Ray is there still, and the words name it"
    error.run = "night"
    assert "its storage does not tell how it ended" in str(in_place_of(error))
