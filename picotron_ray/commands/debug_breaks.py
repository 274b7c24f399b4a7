"""Breakpoints of a run that goes on, looks at its values, traces. Heavy imports are the commands' own."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from picotron_ray.commands.output import emit
from picotron_ray.commands.run import Run
from picotron_ray.launch import AsJson, reported

Place = Annotated[str, typer.Argument(metavar="PLACE", help="FILE.py:LINE or phase:NAME, as phase:reduce")]
Ranks = Annotated[str, typer.Option(metavar="RANKS", help="with commas between; all: all of them")]
Number = Annotated[int, typer.Argument(metavar="NUMBER", help="of a breakpoint, as `ls` shows it")]


def break_(
    run: Run,
    place: Place,
    condition: Annotated[
        str, typer.Option("--if", metavar="EXPRESSION", help="over figures of the run, as 'loss > 9'")
    ] = "",
    ranks: Ranks = "",
    timeout_s: Annotated[float, typer.Option(help="after which a stop ends by itself")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Stop all ranks at the step boundary after one of them passes a line, or enters a phase.

    While they stay nothing counts as a hang. A breakpoint lasts as long as its generation.

    Example: picotron-ray debug break quickstart phase:reduce --if "loss > 9" --ranks 0,3
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import breakpoints

        found = breakpoints.add(run, place, condition, ranks, timeout_s)
        emit(found) if as_json else print(f"breakpoint {found['number']} at {place}")


def ls(run: Run, as_json: AsJson = False) -> None:
    """List breakpoints, how often they were hit, and which one holds the run now.

    Example: picotron-ray debug ls quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import breakpoints

        found = breakpoints.listed(run)
        emit(found) if as_json else print("\n".join(breakpoints.break_lines(found)))


def enable(run: Run, number: Number, as_json: AsJson = False) -> None:
    """Let a breakpoint stop the run again.

    Example: picotron-ray debug enable quickstart 1
    """
    _change(run, number, "enable", as_json)


def disable(run: Run, number: Number, as_json: AsJson = False) -> None:
    """Keep a breakpoint, and let the run pass it.

    Example: picotron-ray debug disable quickstart 1
    """
    _change(run, number, "disable", as_json)


def rm(run: Run, number: Number, as_json: AsJson = False) -> None:
    """Remove a breakpoint; the run stays where it holds it.

    Example: picotron-ray debug rm quickstart 1
    """
    _change(run, number, "rm", as_json)


def _change(run: str, number: int, what: Any, as_json: bool) -> None:
    with reported(as_json):
        from picotron_ray.runtime.driver import breakpoints

        breakpoints.change(run, number, what)
        done = {"enable": "enabled", "disable": "disabled", "rm": "removed"}[what]
        emit({"number": number, "done": done}) if as_json else print(f"breakpoint {number}: {done}")


def continue_(run: Run, as_json: AsJson = False) -> None:
    """Let a run go on that a breakpoint holds.

    Example: picotron-ray debug continue quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import breakpoints

        step, still_set = breakpoints.go_on(run)
        if as_json:
            emit({"step": step, "still_set": still_set})
            return
        print(f"run {run} goes on after step {step}")
        if still_set:
            names = ", ".join(map(str, still_set))
            print(f"breakpoint {names} may hold it again: `picotron-ray debug rm {run} {still_set[0]}`")


def inspect(
    run: Run,
    scope: Annotated[str, typer.Argument(metavar="SCOPE", help="local, global or model")],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="of a value, MODULE.NAME, or a tensor")] = "",
    ranks: Ranks = "",
    shard: Annotated[bool, typer.Option("--shard", help="of the model, what each rank holds")] = False,
    as_json: AsJson = False,
) -> None:
    """Show values while a breakpoint holds the run: norm, least, greatest, histogram.

    Example: picotron-ray debug inspect quickstart model layers.0
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import breakpoints

        found = breakpoints.inspect(run, scope, name, ranks, not shard)
        emit(found) if as_json else print("\n".join(breakpoints.value_lines(found)))


def trace(
    run: Run,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="call, line or memory")],
    steps: Annotated[int, typer.Option(help="that are traced")] = 2,
    ranks: Ranks = "",
    to: Annotated[Path | None, typer.Option("--to", help="folder; left out: NAME-trace here")] = None,
    as_json: AsJson = False,
) -> None:
    """Trace what Python does in the next steps, or memory by phase: a file for Perfetto for each rank.

    Example: picotron-ray debug trace quickstart memory --steps 2
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import breakpoints

        say = partial(print, file=sys.stderr, flush=True)
        found = breakpoints.trace(run, kind, steps, ranks, to or Path(f"{run}-trace"), say)
        if as_json:
            emit(found)
            return
        for one in found:
            left = f", {one['left_out']} left out" if one["left_out"] else ""
            print(f"rank {one['rank']}: {one['events']} events{left}: {one['file']}")


def attach(
    run: Run,
    rank: Annotated[str, typer.Option(metavar="RANK", help="whose process is looked at")] = "0",
    port: Annotated[int, typer.Option(help="for the IDE, on this machine's loopback; 0: any")] = 5678,
    timeout_s: Annotated[
        float, typer.Option(help="longest stop of the rank, which then goes on alone")
    ] = 240.0,
    as_json: AsJson = False,
) -> None:
    """Attach an IDE's debugger (debugpy) to a rank of a run whose config has debug.attach=true.

    Nothing listens where the rank is. Other ranks wait for it up to --timeout-s. The IDE may detach and come
    again until the command is interrupted.

    Example: picotron-ray debug attach quickstart --rank 3
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import attach_debugger

        say = partial(print, file=sys.stderr, flush=True)

        def told(client: int) -> None:
            address = f"{attach_debugger.HOST}:{client}"
            ready = f"attach the IDE to {address} (request attach, justMyCode false)"
            print(json.dumps({"address": address}) if as_json else ready, flush=True)

        try:
            why = attach_debugger.attach(run, rank, port, timeout_s, say, told)
        except KeyboardInterrupt:
            why = "it was interrupted"
        say(f"rank {rank}: {why}; the run goes on")
