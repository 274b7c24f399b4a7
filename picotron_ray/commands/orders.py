"""Orders of operators to a run that goes on, by its name. Heavy imports happen inside the commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from picotron_ray.commands.output import emit
from picotron_ray.commands.run import Run
from picotron_ray.launch import AsJson, reported


def _answer(said: dict[str, Any], as_json: bool) -> None:
    emit(said) if as_json else print(f"run {said['run']}: {said['text']}")


def pause(
    run: Run,
    wait_s: Annotated[
        float, typer.Option(help="longest wait until it rests with all committed; 0: for the answer alone")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Pause a run: a commit, then its workers end and free their devices; snapshots stay in host memory.

    It outlives the coordinator, and lasts until `resume`, `stop`, or another launch of the run.

    Example: picotron-ray pause quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control

        said = control.pause(run, wait_s, lambda line: None if as_json else print(f"run {run}: {line}"))
        rests = said["step"] is not None
        text = f"paused at step {said['step']}, which is committed" if rests else said["text"]
        _answer({**said, "text": text}, as_json)


def resume(run: Run, as_json: AsJson = False) -> None:
    """Have a paused run go on, with the samples that are next; its workers are started anew.

    Example: picotron-ray resume quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control

        _answer(control.resume(run), as_json)


def resize(
    run: Run,
    workers: Annotated[
        int | None, typer.Argument(metavar="[N]", help="most workers; the fewest is lowered to it")
    ] = None,
    least: Annotated[int | None, typer.Option("--min", help="fewest workers to go on with")] = None,
    most: Annotated[int | None, typer.Option("--max", help="most workers; the same as N")] = None,
    as_json: AsJson = False,
) -> None:
    """Change how many workers a run has, at a step boundary; it holds until this launch of the run ends.

    A number that the layout keys do not allow is refused with those that they do (exit code 2). One beyond
    the nodes is taken: the answer says what room there is, and the run grows when nodes join. Ray's
    autoscaler is asked for them where cluster.autoscale says so. Shrinking leaves the emptiest nodes.

    Example: picotron-ray resize quickstart 2
    """
    with reported(as_json):
        from picotron_ray.errors import ConfigError
        from picotron_ray.runtime.driver import control

        if workers is not None and most is not None:
            raise ConfigError(f"resize: saw both {workers} and --max {most}, expected one of them")
        _answer(control.resize(run, least, most if workers is None else workers), as_json)


def drain(
    run: Run,
    node: Annotated[str, typer.Argument(help="beginning of a node's id, as `nodes` lists them")],
    deadline_s: Annotated[
        float, typer.Option(min=0.0, help="seconds until it goes; 0: not known, and 30 are assumed")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Have a run move off a node and give it back; the run does not use it again while this launch lasts.

    An unknown node, and the last one, are refused with exit code 2.

    Example: picotron-ray drain quickstart 3f9a --deadline-s 120
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control

        _answer(control.drain(run, node, deadline_s), as_json)


def nodes(run: Run, as_json: AsJson = False) -> None:
    """List a run's nodes: state, room, workers by rank; and those that may not take part, and why.

    Example: picotron-ray nodes quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control

        rows = control.nodes(run)
        emit(rows) if as_json else print("\n".join(map(node_line, rows)))


def node_line(row: dict[str, Any]) -> str:
    """One line: a node's id, state, and workers with their ranks."""
    workers = [
        f"{w['worker']} ({w['state'] if w['rank'] is None else 'rank ' + str(w['rank'])})"
        for w in row["workers"]
    ]
    left = "" if row["left_s"] is None else f", {row['left_s']:.0f} s left"
    room = f"room for {row['capacity']}: {' '.join(workers) or 'no worker'}"
    said = room if row["capacity"] else row["why"]
    return f"{row['node'][:12]}  {row['state']}{left}  {said}".rstrip()
