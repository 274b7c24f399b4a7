"""``picotron-ray logs``: the lines of a whole run, from all of its nodes."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from picotron_ray.commands.output import emit
from picotron_ray.launch import AsJson, reported

RunOrAddress = Annotated[str, typer.Argument(help="name of a run, or its address in storage")]


def logs(
    run: RunOrAddress,
    rank: Annotated[int | None, typer.Option(help="of the worker, when it wrote the line")] = None,
    node: Annotated[str | None, typer.Option(help="begin of a node's id, or coordinator")] = None,
    since: Annotated[str | None, typer.Option(help="such as 90s, 10m, 2h or 2026-11-26T10:00")] = None,
    level: Annotated[
        str | None, typer.Option(help="this one and graver ones; or stdout or stderr: what is printed there")
    ] = None,
    grep: Annotated[str | None, typer.Option(help="pattern of RE2, anywhere in the text")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep reading until the run ends")] = False,
    once: Annotated[bool, typer.Option("--once", help="end once all that is there was shown")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what all processes of a run wrote, in order of time, also after their, their node's or its end.

    The filters are applied where the lines are. What is printed counts as of the level info, what goes to
    stderr as a warning.

    Example: picotron-ray logs quickstart --rank 1 --since 10m --level warning
    """
    with reported(as_json):
        from picotron_ray.observability.logs.lines import shown
        from picotron_ray.observability.logs.query import query_of
        from picotron_ray.runtime.driver import run_logs

        query = query_of(rank, node, since, level, grep, time.time())
        for entry in run_logs.log_lines(run, query, follow, once):
            emit(entry) if as_json else print(shown(entry), flush=follow)
