"""``picotron-ray top``: the ranks of a run that goes on, live."""

from __future__ import annotations

from typing import Annotated

import typer

from picotron_ray.commands.output import emit
from picotron_ray.commands.run import Run
from picotron_ray.launch import AsJson, reported


def top(
    run: Run,
    once: Annotated[bool, typer.Option("--once", help="look once, and end")] = False,
    interval_s: Annotated[float, typer.Option(min=0.5, help="time between two looks")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Watch a run's ranks: seconds by phase, device, memory, and who is slower than the others, in what.

    Where there are many, the slowest 20 are shown, and a summary of all. The score is a rank's own seconds
    over the median; it needs a round of telemetry (telemetry.interval_s).

    Example: picotron-ray top quickstart --once
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import top as watcher
        from picotron_ray.runtime.driver.console import console
        from picotron_ray.runtime.driver.top_view import summary_text, top_rows

        if not as_json:
            watcher.watch(run, interval_s, once, console(as_json))
            return
        for seen in watcher.statuses(run, interval_s, once):
            emit({"run": run, "summary": summary_text(seen), "ranks": top_rows(seen)})
