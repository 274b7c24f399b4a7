"""The README's set-up commands and what CI runs are the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def set_up_commands() -> list[str]:
    section = (ROOT / "README.md").read_text().split("## Set-up")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def test_exactly_two_set_up_commands_one_line_each() -> None:
    first, second = set_up_commands()
    assert first.endswith("-m picotron_ray.launch quickstart")
    assert shlex.split(second)[-4:] == [".venv/bin/python", "-m", "pytest", "--cov"]


def test_ci_runs_the_readmes_tests_last() -> None:
    last = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last == '"$venv/bin/python" -m pytest --cov "$@"'


def test_every_test_file_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"\btests/[\w/]+\.\w+", text))
    assert len(named) > 8
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
