"""`data prepare` by tasks of a Ray cluster: the same bytes, refusals in one line, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray import cli

pytestmark = pytest.mark.timeout(300)


def texts(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"text {number} " * 100)
    (folder.parent / "run.yaml").write_text(
        json.dumps({"name": "prepared", "data": {"source": "text", "path": str(folder)}})
    )
    return folder


def command(folder: Path, out: str) -> list[str]:
    return ["data", "prepare", str(folder / "run.yaml"), "--out", str(folder / out), "--shards", "12"]


@pytest.mark.deep
def test_tasks_write_the_same_bytes_after_a_kill(local_ray: Any, connected: None, tmp_path: Path) -> None:
    texts(tmp_path / "texts")
    there = {"RAY_ADDRESS": local_ray.address}
    assert CliRunner().invoke(cli.app, command(tmp_path, "whole"), env={"RAY_ADDRESS": ""}).exit_code == 0
    words = [sys.executable, "-c", "from picotron_ray.cli import main; main()", *command(tmp_path, "out")]
    with subprocess.Popen(words, env={**os.environ, **there}, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()  # of the first part
        killed.send_signal(signal.SIGKILL)
    found = CliRunner().invoke(cli.app, [*command(tmp_path, "out"), "--json"], env=there)
    first = json.loads(found.stdout.splitlines()[0])
    assert first.get("kept", 12) >= 1
    for name in ("train.bin", "held_out.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    (tmp_path / "texts/7.txt").write_bytes(b"\xff\xff")
    refused = CliRunner().invoke(cli.app, command(tmp_path, "other"), env=there)
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: data.path: ")
    assert line.endswith("7.txt is not UTF-8 (near byte 0); re-encode it, or choose the text files by a glob")
