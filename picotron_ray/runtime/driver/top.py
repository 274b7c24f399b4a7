"""Watch of a run's ranks, until the run ends or the watcher leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live

from picotron_ray.runtime.driver import control, follow_run
from picotron_ray.runtime.driver.top_view import top_view

LEAST_S = 0.5


def statuses(run: str, interval_s: float, once: bool) -> Iterator[dict[str, Any]]:
    """Yield the status of a run each ``interval_s``, until it has ended; ``once``: the first alone.

    Of a run with more workers than a follower is shown, pages are those of rank 0 alone.

    Raises:
        ConfigError: no run of that name goes on.
        LostRunError: its coordinator does not answer.
    """
    coordinator, _ = control.connect_to_run(run)
    silent = 0
    while True:
        seen = follow_run.poll(coordinator, follow_run.ALL_SEEN, follower=f"top-{os.getpid()}")
        silent = 0 if seen is not None else silent + 1
        if silent > 3:
            raise follow_run.LostRunError(
                f"the coordinator of run {run} does not answer; see `picotron-ray logs {run}`"
            )
        if seen is not None:
            yield seen
            if once or seen["done"]:
                return
        time.sleep(max(LEAST_S, interval_s))


def watch(run: str, interval_s: float, once: bool, console: Console) -> None:
    """Show a run's ranks, live on a terminal; raises as `statuses`."""
    if once or not console.is_terminal:
        for seen in statuses(run, interval_s, once):
            console.print(top_view(seen, console.width))
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for seen in statuses(run, interval_s, once):
            live.update(top_view(seen, console.width), refresh=True)
