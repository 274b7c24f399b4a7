"""Trials as they go: a table in a terminal, elsewhere a line for every trial that ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ray.tune import Callback
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tuning.study_report import as_line, short
from tuning.trial_rows import row_of

EVERY_S = 0.5
MOST_ROWS = 30
"""Rows of the table: what runs, then the newest ends."""


class LiveTable(Callback):
    """Callback that shows trials while they run."""

    def __init__(self, console: Console, figures: Sequence[str]) -> None:
        self._console, self._figures = console, tuple(figures)
        self._live: Live | None = None
        self._next = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_figures": self._figures
        }  # Tune keeps callbacks with the experiment; a console is this process's

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(Console(highlight=False, soft_wrap=True), state["_figures"])  # type: ignore[misc]

    def setup(self, *args: Any, **info: Any) -> None:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=1 / EVERY_S, transient=True)
            self._live.start()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._live and time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self._live.update(table([row_of(trial) for trial in trials], self._figures))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._console.print(as_line(row_of(trial)), markup=False)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._console.print(as_line(row_of(trial)), markup=False)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take the table away; what was printed above it stays."""
        if self._live:
            self._live.stop()
            self._live = None


def table(rows: Sequence[dict[str, Any]], figures: Sequence[str]) -> Table:
    """The trials that run, then those that ended last; how many of each there are in the title."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    shown = Table(title=", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    for name in ("trial", "status", "point", "step", *figures):
        shown.add_column(name)
    running = [row for row in rows if row["status"] in ("running", "paused")]
    others = [row for row in rows if row not in running]
    for row in [*running, *reversed(others)][:MOST_ROWS]:
        point = " ".join(f"{key.rpartition('.')[2]}={short(value)}" for key, value in row["point"].items())
        cells = [
            row["trial"],
            row["status"],
            point,
            short(row["step"]),
            *(short(row[name]) for name in figures),
        ]
        shown.add_row(*map(str, cells))
    return shown
