"""Choice of the reducer by a model of its time, which measured times correct. Torch-free.

A sum of ``n`` bytes takes alpha + beta n seconds, by strategy, axis and link (Hockney 1994). Both are found
by recursive least squares with forgetting (Ljung 1999, section 11.2). An error counts relative to what is
usual for its size, so that microseconds at 1 KiB weigh as much as seconds at 1 GiB, and a link that has
become slow as much as it was when it was fast. Collectives are no lines: backends change their algorithm with
the size, and caches end. So near a size that was measured the line is shifted to what was measured there (the
mean time of sums within a factor of two, forgotten as fast).

A strategy in use is left only for one that is predicted to be faster by more than `HYSTERESIS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HYSTERESIS = 0.1
"""Share of the time of the strategy in use by which another one must be faster."""
EVERY_STEPS = 100
"""Fewest steps between two decisions."""
FORGETTING = 0.98
"""Weight of all that was known, for each step since: what is tried seldom is known from its newest times."""
LEAST = 1e-9
"""Share of the squares that is added to them, so that one size has a line too: the flattest."""
USUAL_S, USUAL_S_PER_BYTE = 1e-4, 1e-9
"""Time of a sum by which an error counts: that of gloo over loopback, in its order of magnitude."""


class Way(NamedTuple):
    """Strategy, the axis that it sums over, and the link below it."""

    strategy: str
    axis: str
    link: str


@dataclass(slots=True)
class LinearTime:
    """Time of a strategy by its bytes.

    >>> model = LinearTime()
    >>> for nbytes in (1e3, 1e6, 1e9):
    ...     model.observe(nbytes, 1e-4 + 2e-10 * nbytes)
    >>> round(model.seconds(1e7), 4)
    0.0021

    Fields:
        alpha: seconds of any sum.
        beta: seconds per byte.
        seen: number of observations.
        at: step of the newest one.
    """

    alpha: float = 0.0
    beta: float = 0.0
    seen: int = 0
    at: int = 0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of both regressors: first, product, second
    _products: tuple[float, float] = (0.0, 0.0)  # of the regressors with the times
    _near: dict[int, Near] = field(default_factory=dict)  # by the power of two of the bytes

    def seconds(self, nbytes: float) -> float:
        """Predict; never below zero."""
        near = self._near.get(_octave(nbytes))
        if near is None:
            return self.line(nbytes)
        mean_bytes, mean_s = near.nbytes / near.weight, near.seconds / near.weight
        there = self.line(mean_bytes)
        return mean_s * self.line(nbytes) / there if there > 0 else mean_s

    def line(self, nbytes: float) -> float:
        """Seconds by alpha and beta alone."""
        return max(0.0, self.alpha + self.beta * nbytes)

    def observe(self, nbytes: float, seconds: float, step: int = 0) -> None:
        """Correct both parameters by a time measured at ``step``."""
        usual = USUAL_S + nbytes * USUAL_S_PER_BYTE
        x, y, found = 1.0 / usual, nbytes / 1e6 / usual, seconds / usual
        keeps = FORGETTING ** max(0, step - self.at)
        (xx, xy, yy), (xt, yt) = self._squares, self._products
        xx, xy, yy = keeps * xx + x * x, keeps * xy + x * y, keeps * yy + y * y
        xt, yt = keeps * xt + x * found, keeps * yt + y * found
        self._squares, self._products = (xx, xy, yy), (xt, yt)
        least = LEAST * (xx + yy)  # of one size alone only the time of that size is known
        a, c = xx + least, yy + least
        whole = a * c - xy * xy
        self.alpha, self.beta = (c * xt - xy * yt) / whole, (a * yt - xy * xt) / whole / 1e6
        if self.beta < 0.0:  # neither can be: the best line is one of the two edges
            self.alpha, self.beta = xt / a, 0.0
        elif self.alpha < 0.0:
            self.alpha, self.beta = 0.0, yt / c / 1e6
        self.seen, self.at = self.seen + 1, step
        self._near.setdefault(_octave(nbytes), Near()).observe(nbytes, seconds, step)


@dataclass(slots=True)
class Near:
    """Sums of what was measured at sizes near each other, with forgetting."""

    weight: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    at: int = 0

    def observe(self, nbytes: float, seconds: float, step: int) -> None:
        """Take in a time."""
        keeps = FORGETTING ** max(0, step - self.at)
        self.weight, self.nbytes = keeps * self.weight + 1.0, keeps * self.nbytes + nbytes
        self.seconds, self.at = keeps * self.seconds + seconds, step


def _octave(nbytes: float) -> int:
    return math.frexp(max(nbytes, 1.0))[1]


@dataclass(slots=True)
class Selector:
    """Models of all ways, and the choice between them.

    Fields:
        models: by way.
    """

    models: dict[Way, LinearTime] = field(default_factory=dict)

    def observe(self, way: Way, nbytes: float, seconds: float, step: int = 0) -> None:
        """Correct the model of a way by a time measured at ``step``."""
        if seconds > 0:
            self.models.setdefault(way, LinearTime()).observe(nbytes, seconds, step)

    def predicted(self, way: Way, nbytes: float) -> float | None:
        """Seconds of a sum; None where the way was never measured."""
        model = self.models.get(way)
        return None if model is None else model.seconds(nbytes)

    def choose(self, ways: Sequence[Way], nbytes: float, current: Way | None = None) -> Way:
        """Choose the way that is predicted to take least; the one in use where none is clearly faster.

        Args:
            ways: at least one. Those that were never measured are chosen only if none was.
        """
        known = [(seconds, way) for way in ways if (seconds := self.predicted(way, nbytes)) is not None]
        if not known:
            return ways[0] if current is None else current
        least, best = min(known)
        now = None if current is None else self.predicted(current, nbytes)
        if current is None or now is None:
            return best
        return best if least < (1.0 - HYSTERESIS) * now else current
