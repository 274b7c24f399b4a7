"""What a benchmark refuses before it measures for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from picotron_ray.commands.bench import benchmarks


@pytest.mark.parametrize("command", [["comm"], ["recovery"], ["telemetry"], ["mfu", "tiny"], ["throughput"]])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    command: list[str], tmp_path: Path
) -> None:
    for bad in (tmp_path / "none" / "x.json", tmp_path):
        done = CliRunner().invoke(benchmarks, [*command, "--json", str(bad)])
        assert done.exit_code != 0
        assert done.output == f"error: --json: saw {bad}, expected a file in a folder that exists\n"
