"""Commands that speak to a run that goes on, by its name. Heavy imports happen inside them."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from picotron_ray.commands.output import emit
from picotron_ray.launch import AsJson, reported

Run = Annotated[str, typer.Argument(help="name of a run")]


def status(run: Run, as_json: AsJson = False) -> None:
    """Step, loss, layout, members and recent events of a run that goes on; how one ended that does not.

    Of one that is being launched it says that. One that has ended and keeps what storage did not take exits
    with 4, a name that was never launched here with 2.

    Example: picotron-ray status quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control
        from picotron_ray.runtime.driver.console import status_lines

        seen = control.status(run)
        emit(seen) if as_json else print("\n".join(status_lines(seen)))


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="kill it, without a commit")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="as --now, and delete what storage could not take yet")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a run with a commit; also removes whatever a killed run left on this machine.

    What storage could not take is kept for the next launch, unless --discard says otherwise. The exit code
    is 0 where it stopped or finished, 4 where storage did not take its last state, 3 where it failed.

    Example: picotron-ray stop quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control
        from picotron_ray.runtime.driver.console import console, summary_lines

        code, summary = control.stop(run, now, console(as_json), discard)
        if as_json:
            emit(summary or {"run": run, "status": "stopping" if code else "ended"})
        elif summary:
            print("\n".join(summary_lines(summary)))
    raise typer.Exit(code)


def checkpoint_now(
    run: Run,
    timeout_s: Annotated[float, typer.Option(help="longest wait for the commit")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Commit a checkpoint at the next step and wait until it is durable.

    Example: picotron-ray checkpoint-now quickstart --timeout-s 60
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control

        step = control.checkpoint_now(run, timeout_s, partial(print, file=sys.stderr, flush=True))
        emit({"run": run, "step": step}) if as_json else print(f"run {run}: step {step} is committed")
