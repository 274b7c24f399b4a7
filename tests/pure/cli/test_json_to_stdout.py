"""``--json -`` of the doors that write figures: JSON on stdout, alone on a line, and no file of that name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from tuning.commands import tune


@pytest.mark.parametrize(
    "words", [("plan", "tiny", "--gpus", "2"), ("analyse", "tiny"), ("plan", "--validate")]
)
def test_figures_alone_are_on_stdout(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, [*words, "--json", "-"], catch_exceptions=False)
    assert found.exit_code == 0, found.stderr
    [line] = found.stdout.splitlines()
    assert json.loads(line)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "nothing"),
        ("analyse", "nothing"),
        ("probe", "--device", "tpu"),
        ("layout", "nothing"),
    ],
    ids=" ".join,
)
def test_what_is_refused_is_json_too(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    door = tune if words[0] == "layout" else app
    found = CliRunner().invoke(door, [*words, "--json", "-"], catch_exceptions=False)
    assert found.exit_code == 2
    [line] = found.stdout.splitlines()
    assert json.loads(line)["exit_code"] == 2
    assert found.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())
