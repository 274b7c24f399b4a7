"""Commands that explain runs from their storage: ``report``, ``runs``, ``runs diff``."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from picotron_ray.launch import reported
from picotron_ray.runtime.driver.asked_files import refuse_unwritable, write_asked

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="also write the result to FILE, as JSON; - is stdout, alone"),
]
Which = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="name of a run that was launched here, its config, or its address (folder or s3://bucket/prefix/run)",
    ),
]


def report(
    run: Which,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="HTML file to write")] = None,
    json_file: JsonFile = None,
) -> None:
    """Explain a run from its storage alone: one HTML page that loads nothing, and its account as JSON.

    It needs no cluster, and works for a run that goes on (as of its newest commit), has ended, or died.

    Example: picotron-ray report quickstart --to report.html
    """
    with reported(json_file == "-"):
        from picotron_ray.errors import ConfigError
        from picotron_ray.runtime.driver import find_stored, story

        if to is None and json_file is None:
            find_stored.find_storage(run)  # a run that is not there is the graver mistake
            raise ConfigError("--to: saw neither --to FILE nor --json FILE; name the file of the report")
        refuse_unwritable("--to", to)
        refuse_unwritable("--json", file_of(json_file))
        found = story.report(run)
        if to is not None:
            write_asked("--to", to, found.page)
        write_json(found.account, json_file)
        if json_file != "-":
            print("\n".join(story.report_lines(found.account)))
            print(f"report: {to}" if to is not None else f"account: {json_file}")


def runs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL | diff RUN RUN]",
            help="folder or s3://bucket/prefix that holds runs (./runs); or diff and two runs, each named as"
            " for report",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """List all runs below a storage URL, or (diff) say in what two runs differ. It needs no cluster.

    A run that died without an end is told from one that goes on by its signs of life in storage. Differences
    are those of configs, loss curves, figures and environments.

    Example: picotron-ray runs ./runs
    """
    with reported(json_file == "-"):
        from picotron_ray.errors import ConfigError
        from picotron_ray.runtime.driver import run_list

        refuse_unwritable("--json", file_of(json_file))
        given = words or ["./runs"]
        found: Any
        if given[0] == "diff" and len(given) == 3:
            found = run_list.diff_runs(*given[1:])
            lines = run_list.diff_lines(found)
        elif len(given) == 1 and given != ["diff"]:
            found = run_list.list_runs(given[0])
            lines = run_list.run_lines(found, given[0])
        else:
            meant = (
                "; did you mean diff?" if get_close_matches(given[0], ["diff"]) and given[0] != "diff" else ""
            )
            raise ConfigError(f"runs: saw {' '.join(given)!r}, expected one URL, or: diff RUN RUN{meant}")
        write_json(found, json_file)
        if json_file != "-":
            print("\n".join(lines))


def file_of(json_file: str | None) -> Path | None:
    """Return the file that ``--json`` names; None where it is stdout, or not given."""
    return None if json_file is None or json_file == "-" else Path(json_file)


def write_json(value: Any, json_file: str | None) -> None:
    """Write a value as ``--json`` says."""
    if json_file == "-":
        print(json.dumps(value), flush=True)
    elif json_file is not None:
        write_asked("--json", Path(json_file), json.dumps(value, indent=1) + "\n")
