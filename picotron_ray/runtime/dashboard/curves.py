"""Curves of a run by step, in bounded room: what the page draws.

A step that is told again replaces what was told before, and one that lies before the newest makes all after
it void: the run has gone back. Beyond `MOST` points a curve keeps every other one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

MOST = 4000
"""Points of a figure that are held."""
SHOWN = 600
"""Points of a figure that are sent."""


class Curves:
    """Figures by step.

    >>> curves = Curves()
    >>> curves.add(1, {"loss": 3.0})
    >>> curves.add(2, {"loss": float("nan")})
    >>> curves.shown("loss")
    [[1, 3.0]]
    """

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}
        self._last = -1

    def add(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Take the newest step's figures; those that are not finite are left out."""
        if step < self._last:
            self._go_back(step)
        self._last = max(step, self._last if step >= self._last else step)
        self.fill([(step, figures)])

    def fill(self, rows: Iterable[tuple[int, Mapping[str, float | None]]]) -> None:
        """Take figures of steps that are known to count, in any order."""
        for step, figures in rows:
            for name, value in figures.items():
                if value is not None and math.isfinite(value):
                    self._points.setdefault(name, {})[step] = float(value)
        for name, points in self._points.items():
            if len(points) > MOST:
                self._points[name] = dict(sorted(points.items())[-1::-2][::-1])

    def _go_back(self, step: int) -> None:
        self._last = step
        for name, points in self._points.items():
            self._points[name] = {at: value for at, value in points.items() if at <= step}

    def all(self, name: str) -> list[tuple[int, float]]:
        """Return all points that are held of a figure, by step."""
        return sorted(self._points.get(name, {}).items())

    def newest(self, name: str) -> float | None:
        """Return the newest value of a figure; None where there is none."""
        points = self._points.get(name)
        return points[max(points)] if points else None

    def shown(self, name: str, most: int = SHOWN) -> list[list[float]]:
        """Return at most ``most`` points of a figure: of each stretch of steps the least and the largest."""
        return thinned(self.all(name), most)


def thinned(points: list[tuple[int, float]], most: int) -> list[list[float]]:
    """Thin points without hiding a spike: of neighbours the least and the largest stay.

    >>> thinned([(step, 9.0 if step == 5 else 1.0) for step in range(8)], 4)
    [[0, 1.0], [4, 1.0], [5, 9.0]]
    """
    if len(points) <= most:
        return [[step, _short(value)] for step, value in points]
    size = math.ceil(len(points) / max(1, most // 2))
    found: list[list[float]] = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        found += [[step, _short(value)] for step, value in sorted(ends)]
    return found


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def goodput(times: list[tuple[int, float]], began_s: float) -> list[tuple[int, float]]:
    """Return the share of the time since a run's begin that its steps would have taken undisturbed, by step.

    A step's own time is the median of those between neighbours.

    Args:
        times: (step, seconds since the epoch at which it was finished), by step.
    """
    gaps = sorted(
        (after_s - before_s) / (after - before)
        for (before, before_s), (after, after_s) in pairwise(times)
        if after > before and after_s > before_s
    )
    if not gaps:
        return []
    usual_s, first = gaps[len(gaps) // 2], times[0][0] - 1
    return [
        (step, min(1.0, (step - first) * usual_s / (at_s - began_s)))
        for step, at_s in times
        if at_s > began_s
    ]
