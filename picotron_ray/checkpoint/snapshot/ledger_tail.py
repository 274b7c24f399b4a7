"""Ledger lines since the last commit: the loop adds to them, commits take them away, snapshots carry them.

A snapshot carries at most twice ``SPILL_LINES`` of them. Older ones go to the node's disk (`ledger_spill`),
by a thread of its own: a disk that hangs holds no step up.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from picotron_ray.checkpoint.snapshot import ledger_spill
from picotron_ray.checkpoint.snapshot.ledger_spill import Spilled

log = logging.getLogger(__name__)
SPILL_LINES = 256
Lines = list[tuple[int, str]]


class LedgerTail:
    """Lines of steps that are not in storage yet, oldest first; any thread may call it."""

    def __init__(self, folder: Path | None = None, spill_lines: int = 0) -> None:
        """
        Args:
            folder: for what is spilled; None: all is kept here.
            spill_lines: of a file; 0: ``SPILL_LINES``.
        """
        self._folder, self._spill_lines = folder, spill_lines
        self._lock = threading.Lock()
        self._lines: Lines = []  # step, JSON
        self._spilled = Spilled()  # the lines before
        self._spilling: threading.Thread | None = None

    def add(self, step: int, line: str) -> None:
        """Add the line of a step."""
        most = self._spill_lines or SPILL_LINES
        with self._lock:
            self._lines.append((step, line))
            if self._folder is None or self._spilling is not None or len(self._lines) < 2 * most:
                return
            work = (self._folder, self._lines[:most], self._spilled.name)
            self._spilling = threading.Thread(target=self._spill, args=work, name="ledger-spill", daemon=True)
            self._spilling.start()

    def _spill(self, folder: Path, oldest: Lines, after: str) -> None:
        name = ""
        try:
            lines = [line for _, line in oldest]
            name = ledger_spill.spill(folder, after, lines, oldest[0][0], oldest[-1][0])
        except OSError as error:
            log.warning("ledger lines stay in memory: %s cannot be written: %s", folder, error)
        with self._lock:
            self._spilling = None
            # else a commit took some of them away, and the rest comes next time
            if name and self._spilled.name == after and self._lines[: len(oldest)] == oldest:
                del self._lines[: len(oldest)]
                self._spilled = Spilled(name, self._spilled.first if after else oldest[0][0])

    def restore(self, ledger: Sequence[str]) -> None:
        """Go on from the lines that a snapshot carried."""
        spilled, lines = ledger_spill.split_marker(ledger)
        found = [(int(json.loads(line)["step"]), line) for line in lines]
        with self._lock:
            self._lines, self._spilled = found + self._lines, spilled

    def committed(self, step: int) -> None:
        """Drop the lines up to ``step``: they are in storage. The agent knows when files may go."""
        with self._lock:
            self._lines = [entry for entry in self._lines if entry[0] > step]
            name, first = self._spilled
            done = not name or ledger_spill.steps_of(name)[1] <= step
            self._spilled = Spilled() if done else Spilled(name, max(first, step + 1))

    def lines(self) -> tuple[str, ...]:
        """Return what a snapshot of the present state must carry."""
        with self._lock:
            lines = tuple(line for _, line in self._lines)
            return (ledger_spill.marker(self._spilled), *lines) if self._spilled.name else lines
