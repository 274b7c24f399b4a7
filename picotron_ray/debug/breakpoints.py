"""Breakpoints: where all ranks are to stop at the next step boundary, and what they say of themselves."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from picotron_ray.config.schema.service import PHASES
from picotron_ray.debug.condition import BreakCondition
from picotron_ray.errors import ConfigError

PHASE = "phase:"
STEP_ENTERS = ("data", "forward", "backward", "reduce", "clip", "sync", "optimizer", "evaluate")
"""Phases that a breakpoint may name: those that the loop enters as it trains."""
MOST = 32
"""Breakpoints of a run at a time."""
MOST_TIMEOUT_S = 86_400.0


@dataclass(slots=True)
class Breakpoint:
    """A breakpoint.

    Fields:
        number: by which it is named; counted from 1.
        place: ``phase:reduce``, or a file and a line with a colon between.
        condition: that must hold there; empty: any pass stops.
        ranks: that look at it; empty: all.
        timeout_s: seconds after which a stop ends by itself.
        hits: how often it has stopped the run, on one rank.
    """

    number: int
    place: str
    condition: str = ""
    ranks: tuple[int, ...] = ()
    timeout_s: float = 600.0
    enabled: bool = True
    hits: int = 0

    def __post_init__(self) -> None:
        self.ranks = tuple(self.ranks)

    @property
    def phase(self) -> str:
        """The phase that it names; empty: it names a line."""
        return self.place.removeprefix(PHASE) if self.place.startswith(PHASE) else ""

    @property
    def line(self) -> tuple[str, int]:
        """File and line that it names."""
        file, _, line = self.place.rpartition(":")
        return file, int(line)

    def concerns(self, rank: int) -> bool:
        """Whether a rank looks at it."""
        return self.enabled and (not self.ranks or rank in self.ranks)

    def check(self) -> None:
        """Refuse what can be seen to be wrong without a run.

        Raises:
            ConfigError: place or condition cannot be used.
        """
        check_place(self.place)
        if self.condition:
            BreakCondition(self.condition)
        if not 0 < self.timeout_s <= MOST_TIMEOUT_S:
            raise ConfigError(
                f"--timeout-s: saw {self.timeout_s:g}, expected above 0 and at most {MOST_TIMEOUT_S:g}"
            )

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "ranks": list(self.ranks)}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Breakpoint:
        """The breakpoint of `plain`."""
        return cls(**data)

    def __str__(self) -> str:
        parts = [f"{self.number} {self.place}"]
        parts += [f"if {self.condition}"] if self.condition else []
        parts += [f"on ranks {','.join(map(str, self.ranks))}"] if self.ranks else []
        return " ".join(parts)


def check_place(place: str) -> None:
    """Refuse a place that is neither a phase nor a file with a line.

    Raises:
        ConfigError: it is not.
    """
    if place.startswith(PHASE):
        phase = place.removeprefix(PHASE)
        if phase not in STEP_ENTERS:
            known = phase in PHASES
            near = difflib.get_close_matches(phase, STEP_ENTERS, 1, 0.0)[0]
            why = "which is no part of training" if known else "which is no phase"
            raise ConfigError(f"break: saw {phase!r}, {why}; nearest: {near} (of {', '.join(STEP_ENTERS)})")
        return
    file, colon, line = place.rpartition(":")
    if not (colon and file.endswith(".py") and line.isdigit() and int(line) > 0):
        raise ConfigError(f"break: saw {place!r}, expected FILE.py:LINE or phase:NAME, such as phase:reduce")


def line_problem(file: str, line: int, lines: Collection[int]) -> str:
    """Say why a line of a file cannot be stopped at; empty where it can.

    Args:
        lines: those that functions of the file run.

    >>> line_problem("train/loop.py", 3, {2, 5})
    'train/loop.py:3 is run by no function; nearest line that is: 2'
    """
    if line in lines:
        return ""
    if not lines:
        return f"{file} has no function"
    near = min(sorted(lines), key=lambda other: abs(other - line))
    return f"{file}:{line} is run by no function; nearest line that is: {near}"
