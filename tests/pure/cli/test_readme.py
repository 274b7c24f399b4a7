"""The README: short, its set-up commands are what CI runs, what it says of the code is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
MOST_WORDS = 1000
MOST_CONTRIBUTING_LINES = 119


def set_up_commands() -> list[str]:
    section = README.split("## Set-up")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def test_exactly_two_set_up_commands_one_line_each() -> None:
    first, second = set_up_commands()
    assert first.endswith("-m picotron_ray.launch quickstart")
    assert shlex.split(second)[-5:] == [".venv/bin/python", "-m", "pytest", "-n", "2"]


def test_ci_runs_the_readmes_tests_last() -> None:
    last = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last == '"$venv/bin/python" -m pytest -n 2 "$@"'


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= MOST_CONTRIBUTING_LINES


def test_the_first_screen_has_the_picture_the_figures_and_what_is_not_proven() -> None:
    places = [
        README.index(text) for text in ("docs/_static/kill.svg", "kill to next new step", "on several GPUs")
    ]
    assert places == sorted(places)
    assert README[: places[-1]].count("\n") < 40


def test_the_training_loop_has_as_many_lines_as_the_readme_says() -> None:
    said = re.search(r"training loop is these (\d+) lines: \[[^]]*\]\(([^)]+)\)", README)
    assert said is not None
    assert len((ROOT / said[2]).read_text().splitlines()) == int(said[1])


def test_make_has_a_target_for_each_check_and_each_one_named() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"check", "test", "docs", "bench", "deep"} <= targets
    pages = [README, (ROOT / "CONTRIBUTING.md").read_text()]
    named = {name for page in pages for name in re.findall(r"\bmake ([\w-]+)`", page)}
    assert named
    assert named <= targets


def test_the_hooks_fetch_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    tools = {" ".join(hook["entry"].split()[:2]) for hook in hooks}
    assert tools == {"ruff check", "ruff format", "lint-imports", "mypy"}
