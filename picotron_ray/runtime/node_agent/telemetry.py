"""Telemetry of a node's workers: their pages, summed up once per interval and sent with a heartbeat.

Reading asks nothing of the workers. What is lost on the way is not sent again: the next interval's figures
take its place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from picotron_ray.runtime.node_agent.beats import Figures
from picotron_ray.runtime.telemetry_page import SUFFIX, PageRows, read_rows
from picotron_ray.runtime.telemetry_window import KEY, WorkerFigures, figures_of, newest

log = logging.getLogger(__name__)


class MachineReader(Protocol):
    """Reader of a node's machine."""

    def utilizations(self) -> Mapping[str, float]:
        """Share of its time in which each GPU computes, by UUID."""
        ...

    def health(self) -> dict[str, float]:
        """Figures of the machine, as a telemetry window has them."""
        ...


class Telemetry:
    """Reader of the pages of one node; for one thread."""

    def __init__(self, folder: Path, interval_s: float | None, machine: MachineReader) -> None:
        """``interval_s``: None: nothing is measured."""
        self._folder, self._interval_s, self._machine = folder, interval_s, machine
        self._next_s = math.inf if interval_s is None else -math.inf
        self._seen: dict[str, list[float]] = {}  # by GPU, since the last figures

    def added(self, beat: Figures, now_s: float) -> Figures:
        """Return a heartbeat with the figures of its workers, where they are due.

        Never raises: a page that cannot be read costs its worker the figures of one interval.
        """
        if self._next_s == -math.inf:
            self._next_s = now_s + (self._interval_s or 0.0)
        if self._interval_s is None:
            return beat
        try:
            self._look_at_gpus()
            if now_s < self._next_s:
                return beat
            self._next_s = now_s + self._interval_s
            told = [self._with_figures(entry) for entry in beat]
            self._seen.clear()
            return self._with_health(told)
        except Exception:  # whatever it is: a heartbeat matters more
            log.exception("no telemetry for %g s", self._interval_s)
            self._next_s = now_s + self._interval_s
            return beat

    def _look_at_gpus(self) -> None:
        for gpu, share in self._machine.utilizations().items():
            self._seen.setdefault(gpu, []).append(share)

    def _with_health(self, beat: Figures) -> Figures:
        """The heartbeat with the machine's health, which the first worker with figures carries."""
        for place, entry in enumerate(beat):
            if KEY in entry:
                entry = {**entry, KEY: replace(entry[KEY], health=self._machine.health())}
                return [*beat[:place], entry, *beat[place + 1 :]]
        return beat

    def _with_figures(self, entry: dict[str, Any]) -> dict[str, Any]:
        page = read_rows(self._folder / f"{entry['worker']}{SUFFIX}") if "term" in entry else None
        if page is None or page.pid != entry["pid"]:
            return entry
        found = self._figures(page)
        if found is None or (found.term, found.n) != (entry["term"], entry["n"]):
            return entry
        return {**entry, KEY: found}

    def _figures(self, page: PageRows) -> WorkerFigures | None:
        shares = self._seen.get(page.gpu, ())
        rows = newest(page.rows, self._interval_s or 0.0)
        return figures_of(rows, sum(shares) / len(shares) if shares else None)
