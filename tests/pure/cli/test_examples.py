"""Every command's help has an example line, and its words are ones that the command takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from picotron_ray import cli, launch
from tuning import commands as tuning
from tuning import sweep

DOORS = {
    "picotron-ray": cli.app,
    "python -m picotron_ray.launch": launch.main,
    "python -m tuning.sweep": sweep.main,
}
ONE_COMMAND = {launch.main: launch.train, sweep.main: sweep.main}


def command_of(words: str) -> Any:
    """The click command behind a door."""
    door = DOORS[words]
    if isinstance(door, typer.Typer):
        return typer.main.get_command(door)
    app = typer.Typer(add_completion=False)
    app.command()(ONE_COMMAND[door])
    return typer.main.get_command(app)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words, command) of every command below a group."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, each in below.items():
        yield from commands(each, (*path, name))


ALL = list(commands(command_of("picotron-ray")))


def example(text: str | None) -> str:
    (line,) = re.findall(r"^ *Example: (.+)$", text or "", re.MULTILINE)
    return str(line)


def test_all_commands_are_looked_at() -> None:
    assert len(ALL) >= 17
    assert {("train",), ("checkpoints", "import-hf"), ("ledger", "verify"), ("bench", "mfu")} <= {
        path for path, _ in ALL
    }


@pytest.mark.parametrize(("path", "command"), ALL, ids=["-".join(path) for path, _ in ALL])
def test_every_commands_example_parses(path: tuple[str, ...], command: Any) -> None:
    program, *words = shlex.split(example(command.help))
    assert program == "picotron-ray"
    assert tuple(words[: len(path)]) == path
    with command.make_context(path[-1], words[len(path) :]) as context:  # click refuses unknown words here
        assert context.params
    shown = CliRunner().invoke(cli.app, [*path, "--help"])
    assert shown.exit_code == 0
    assert "Example: picotron-ray" in shown.stdout


@pytest.mark.parametrize(
    ("door", "entry"), [(door, entry) for door, entry in DOORS.items() if not isinstance(entry, typer.Typer)]
)
def test_the_modules_examples_parse(door: str, entry: Any) -> None:
    line = example(entry.__doc__)
    assert line.startswith(f"{door} ")
    words = shlex.split(line.removeprefix(door))
    command_of(door).make_context(door, words).close()


def test_no_option_says_two_defaults() -> None:
    """Click prints a default of its own, `[default: 1]`, which words beside it must not contradict."""
    tune = commands(typer.main.get_command(tuning.tune), ("tune",))
    two = [
        (*path, option.name)
        for path, command in (*ALL, *tune)
        for option in command.params
        if "default" in (getattr(option, "help", "") or "") and option.default not in (None, False)
    ]
    assert not two
