"""``debug NAME deadlock|comm``: why the ranks of a run stand still. Heavy imports are the commands' own."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from picotron_ray.commands.output import emit
from picotron_ray.commands.run import Run
from picotron_ray.launch import AsJson, reported

Kept = Annotated[
    bool, typer.Option("--kept", help="judge what the newest failure has kept, in place of asking the ranks")
]


def deadlock(run: Run, kept: Kept = False, as_json: AsJson = False) -> None:
    """Say which ranks wait for which, who is late, and where: also while they hang.

    Where the run recovers from a hang, what that has kept is judged.

    Example: picotron-ray debug deadlock quickstart
    """
    _judge(run, "deadlock", kept, as_json)


def comm(run: Run, kept: Kept = False, as_json: AsJson = False) -> None:
    """Say which operation ranks called differently first, and which link carries nothing any more.

    Example: picotron-ray debug comm quickstart
    """
    _judge(run, "comm", kept, as_json)


def _judge(run: str, question: Literal["deadlock", "comm"], kept: bool, as_json: bool) -> None:
    with reported(as_json):
        from picotron_ray.debug.verdict_lines import verdict_lines
        from picotron_ray.runtime.driver import hang_verdicts

        found = hang_verdicts.verdict(run, kept)
        emit(found) if as_json else print("\n".join(verdict_lines(found, question)))
