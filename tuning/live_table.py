"""Trials as they go: a table in a terminal, elsewhere a line for every trial that ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.tune import Callback
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuning.objectives import Objective, front
from tuning.study_report import as_line, point_text, short
from tuning.trial_rows import ENDED, row_of

EVERY_S = 0.5
MOST_ROWS = 30
"""Rows of the table: what runs, then the newest ends."""


class LiveTable(Callback):
    """Callback that shows trials while they run.

    Args:
        figures: those of the objective.
        count: trials of the study.
    """

    def __init__(self, console: Console, figures: Sequence[str], count: int) -> None:
        self._console, self._figures, self._count = console, tuple(figures), count
        self._live: Live | None = None
        self._began = self._next = time.monotonic()

    def __getstate__(self) -> None:
        """Keep nothing: a study that is resumed makes its callbacks anew."""

    def setup(self, *args: Any, **info: Any) -> None:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                refresh_per_second=1 / EVERY_S,
                transient=True,
                redirect_stdout=False,  # where Ray writes guesses at the cause of each worker that ends
            )
            self._live.start()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._live and time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            rows = [row_of(trial) for trial in trials]
            self._live.update(table(rows, self._figures, self._count, time.monotonic() - self._began))

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


def table(rows: Sequence[dict[str, Any]], figures: Sequence[str], count: int, seconds: float) -> Group:
    """Numbers of trials by state, and the best; then those that run, and the last to end."""
    shown = Table()
    for name in ("trial", "status", "point", "step", *figures):
        shown.add_column(name)
    running = [row for row in rows if row["status"] in ("running", "paused")]
    ended = [row for row in rows if row["status"] in ENDED]
    for row in [*running, *reversed(ended)][:MOST_ROWS]:
        cells = [row["trial"], row["status"], point_text(row), short(row["step"])]
        shown.add_row(*map(str, cells), *(short(row[name]) for name in figures))
    return Group(Text(_title(rows, figures, count, seconds)), shown)


def _title(rows: Sequence[dict[str, Any]], figures: Sequence[str], count: int, seconds: float) -> str:
    counts = Counter(row["status"] for row in rows)
    waiting = max(0, count - len(rows)) + counts.pop("pending", 0)
    states = [f"{number} {status}" for status, number in sorted(counts.items())]
    text = f"{', '.join([*states, f'{waiting} to come'])} of {count} trials, {seconds:.0f} s"
    best = front(rows, Objective(tuple(figures)))
    if best:
        text += f"; best {best[0]['trial']}: " + ", ".join(
            f"{name} {short(best[0][name])}" for name in figures
        )
    return text
