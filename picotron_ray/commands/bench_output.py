"""Output of benchmarks: progress, errors in one line, and a result as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from picotron_ray.launch import reported
from picotron_ray.runtime.driver.asked_files import refuse_unwritable, write_asked

JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="write the result to FILE; - is stdout")
]


def say(line: str) -> None:
    """Tell progress, which is not part of a result."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def writing(json_file: str | None) -> Iterator[None]:
    """Refuse a file that nothing can be written to before hours of measuring, and report what is raised."""
    with reported(json_file == "-"):
        if json_file not in (None, "-"):
            refuse_unwritable("--json", Path(json_file))
        yield


def result(found: dict[str, Any], lines: list[str], json_file: str | None) -> None:
    """Give a benchmark's result: as one line of JSON on stdout, or as text, with a file beside it."""
    if json_file == "-":
        return print(json.dumps(found), flush=True)
    if json_file is not None:
        write_asked("--json", Path(json_file), json.dumps(found, indent=2) + "\n")
    return print("\n".join(lines))
