"""``picotron-ray profile``: a trace of some steps of a run that goes on. Heavy imports happen inside it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from picotron_ray.commands.output import emit
from picotron_ray.commands.run import Run
from picotron_ray.launch import AsJson, reported

Wait = Annotated[int, typer.Option(help="steps before anything is recorded")]
Ranks = Annotated[
    str, typer.Option(metavar="RANKS", help="with commas between; left out: the first of each pipeline stage")
]


def profile(
    run: Run,
    wait: Wait = 1,
    warmup: Annotated[int, typer.Option(help="steps in which the profiler gets ready")] = 1,
    active: Annotated[int, typer.Option(help="steps that are recorded")] = 3,
    ranks: Ranks = "",
    to: Annotated[Path | None, typer.Option("--to", help="folder; left out: NAME-profile here")] = None,
    shapes: Annotated[bool, typer.Option(help="record the shapes of tensors")] = True,
    stacks: Annotated[bool, typer.Option(help="record the Python stacks; slow")] = False,
    measured: Annotated[
        Path | None,
        typer.Option(help="result of `bench mfu CONFIG --ablate --json FILE`, to rank suggestions"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record steps of a run that goes on: one trace for all ranks on one clock, and what they wait for.

    All ranks begin at one step boundary, and stay at the last one's until the traces are written. Losses do
    not change.

    Example: picotron-ray profile quickstart --active 2 --to /tmp/profile
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import profile_run

        options = profile_run.ProfileOptions(
            wait, warmup, active, ranks, to or Path(f"{run}-profile"), shapes, stacks, measured
        )
        found = profile_run.profile(run, options, partial(print, file=sys.stderr, flush=True))
        emit(found) if as_json else print("\n".join(profile_run.lines(found)))
