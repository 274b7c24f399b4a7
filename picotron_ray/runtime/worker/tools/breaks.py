"""Breakpoints of one rank. A hit asks all ranks to stay at the next boundary, until somebody says go on.

What a hit saw is kept as figures and texts, never as references: a stop holds no tensor that training would
have freed. Conditions look at the figures of the heartbeat page.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from picotron_ray.debug.breakpoints import MOST, Breakpoint, line_problem
from picotron_ray.debug.condition import BreakCondition
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.tools.line_watch import LineWatch, function_lines, loaded_files
from picotron_ray.runtime.worker.tools.values import named_values

log = logging.getLogger(__name__)
_OF_PAGE = {
    "step_s": "step_time_s",
    "allocated_bytes": "cuda_allocated_bytes",
    "reserved_bytes": "cuda_reserved_bytes",
}
"""Figures whose field of the page has another name."""


class Breaks:
    """Breakpoints of one rank in one generation.

    ``install`` is called by the thread that trains, orders by any.

    Args:
        hold: asks all ranks to stay.
    """

    def __init__(self, page: Page, rank: int, hold: Callable[[], None]) -> None:
        self._page, self._rank, self._hold = page, rank, hold
        self._lock = threading.RLock()
        self._known: dict[int, Breakpoint] = {}
        self._conditions: dict[int, BreakCondition] = {}
        self._files: dict[int, str] = {}
        self._by_line: dict[tuple[str, int], list[Breakpoint]] = {}
        self._by_phase: dict[str, list[Breakpoint]] = {}
        self._watch = LineWatch(self._passed)
        self._dirty = False
        self.hit: dict[str, Any] | None = None
        """What stopped the run, until it goes on."""
        self._until_s = 0.0

    # --- orders -------------------------------------------------------------------------------------

    def add(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Add a breakpoint.

        Raises:
            ConfigError: it cannot be used here.
        """
        one = Breakpoint.read(data)
        one.check()
        with self._lock:
            if len(self._known) >= MOST and one.number not in self._known:
                raise ConfigError(f"break: saw {MOST} breakpoints already; remove one with `rm`")
            if not one.phase:
                self._files[one.number] = self._file(*one.line)
            if one.condition:
                self._conditions[one.number] = BreakCondition(one.condition)
            self._known[one.number] = one
            self._dirty = True
        return one.plain()

    @staticmethod
    def _file(tail: str, line: int) -> str:
        found = loaded_files(tail)
        if len(found) != 1:
            why = f"is none of the files that this run has loaded: saw {tail!r}"
            if found:
                why = f"is not one file: {', '.join(found[:3])}; give more of its path"
            raise ConfigError(f"break: {tail} {why}")
        try:
            problem = line_problem(tail, line, function_lines(found[0]))
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"break: {found[0]} cannot be read: {error}") from error
        if problem:
            raise ConfigError(f"break: {problem}")
        return found[0]

    def change(self, number: int, what: str) -> dict[str, Any]:
        """Enable, disable or remove (``rm``) a breakpoint; one that this rank does not know is no error."""
        with self._lock:
            one = self._known.get(number)
            if one is None:
                return {"known": False}
            if what == "rm":
                for table in (self._known, self._conditions, self._files):
                    table.pop(number, None)
            else:
                one.enabled = what == "enable"
            self._dirty = True
            return {"known": True}

    def go_on(self) -> bool:
        """End this rank's stop; False where it causes none."""
        was, self.hit = self.hit, None
        return was is not None

    def refuse_lines(self, why: str) -> None:
        """Refuse what cannot be beside a watched line.

        Raises:
            ConfigError: ``why``: there is one.
        """
        with self._lock:
            if self._files or self._by_line:
                raise ConfigError(why)

    def plain(self) -> list[dict[str, Any]]:
        """All of them, as JSON values."""
        with self._lock:
            return [one.plain() for one in self._known.values()]

    # --- the thread that trains -----------------------------------------------------------------------

    @property
    def stops(self) -> bool:
        """Whether a hit of this rank still holds all of them; it ends by itself after its time."""
        if self.hit is not None and time.monotonic() >= self._until_s:
            log.warning("breakpoint %s: its time is over, the run goes on", self.hit["break"])
            self.hit = None
        return self.hit is not None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do at a boundary."""
        return not self._dirty and not self._by_phase

    def install(self) -> None:
        """Put into force what was ordered since the last boundary."""
        if not self._dirty:
            return
        with self._lock:
            self._dirty = False
            lines: dict[tuple[str, int], list[Breakpoint]] = defaultdict(list)
            phases: dict[str, list[Breakpoint]] = defaultdict(list)
            for one in self._known.values():
                if one.concerns(self._rank) and one.phase:
                    phases[one.phase].append(one)
                elif one.concerns(self._rank):
                    lines[self._place(one)].append(one)
            self._by_phase, self._by_line = dict(phases), dict(lines)
        watched: dict[str, set[int]] = defaultdict(set)
        for file, line in self._by_line:
            watched[file].add(line)
        self._watch.set(watched)

    def _place(self, one: Breakpoint) -> tuple[str, int]:
        return self._files[one.number], one.line[1]

    def close(self) -> None:
        """Watch nothing any more."""
        self._watch.clear()
        self._by_phase, self._by_line, self.hit = {}, {}, None

    @property
    def on_phase(self) -> Callable[[int, str], None] | None:
        """Listener to each phase; None: there is none."""
        return self._entered if self._by_phase else None

    def _entered(self, step: int, phase: str) -> None:
        for one in self._by_phase.get(phase, ()):
            if self._fits(one):
                self._stop(one, {"step": step, "phase": phase}, {})

    def _passed(self, frame: FrameType, line: int) -> None:
        for one in self._by_line.get((frame.f_code.co_filename, line), ()):
            if self._fits(one):
                where = {"function": frame.f_code.co_qualname, "step": self._page.computing_step}
                module = frame.f_globals.get("__name__", "")
                self._stop(one, {**where, "phase": self._page.name, "module": module}, frame.f_locals)

    def _fits(self, one: Breakpoint) -> bool:
        if self.hit is not None or not one.enabled or one.number not in self._known:
            return False  # one stop at a time; what was removed since the last boundary stops nobody
        condition = self._conditions.get(one.number)
        return condition is None or condition.holds(self.figures())

    def _stop(self, one: Breakpoint, where: dict[str, Any], values: Mapping[str, Any]) -> None:
        one.hits += 1
        try:
            seen = named_values(values)
        except Exception as error:  # noqa: BLE001 (a look must not end a run)
            seen = {"": f"not readable: {type(error).__name__}"}
        self._until_s = time.monotonic() + one.timeout_s
        self.hit = {"break": str(one), "number": one.number, "rank": self._rank, **where, "locals": seen}
        self._hold()

    def figures(self) -> dict[str, float]:
        """Figures that conditions may name, as far as the page has them."""
        page = self._page
        names = (
            "loss",
            "grad_norm",
            "learning_rate",
            "tokens",
            "eval_loss",
            "bad_steps",
            "pending_operations",
        )
        found = {name: page.value(name) for name in (*names, *_OF_PAGE.values())}
        found |= {name: found.pop(field) for name, field in _OF_PAGE.items()}
        return {**found, "step": page.computing_step, "rank": self._rank}
