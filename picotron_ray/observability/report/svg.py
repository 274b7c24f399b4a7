"""Charts as SVG text for a page that loads nothing: lines with marks, spans of time, a stacked bar.

Libraries that draw for the web bring megabytes of script, and one that draws pictures brings fonts and no
dark mode. Three kinds of charts need neither. Colours are classes of the page's style sheet. A chart has a
title and a description for those who do not see it, and marks are told apart by letters too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 880, 64, 16, 22, 34
MOST_POINTS = 1000
"""Points of a line; of more, neighbours become their mean."""
MOST_MARKS = 200
LINE_HEIGHT, ROW_HEIGHT = 240, 22


Points = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """An event at a place of the horizontal axis; ``kind`` is a class of the style sheet."""

    x: float
    kind: str
    letter: str
    text: str


class Span(NamedTuple):
    """A stretch of the horizontal axis, in a row of its own."""

    start: float
    end: float
    label: str
    text: str


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``.

    >>> ticks(0.0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * each for each in (1, 2, 5, 10) if size * each >= raw * 0.999)
    first = math.ceil(low / step)
    return [round(step * at, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned_points(
    points: Sequence[tuple[float, float]], most: int = MOST_POINTS
) -> list[tuple[float, float]]:
    """Return at most ``most`` points; neighbours become their mean."""
    each = max(1, -(-len(points) // most))
    groups = [points[at : at + each] for at in range(0, len(points), each)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def line_chart(
    title: str,
    lines: Sequence[tuple[str, Points]],
    marks: Sequence[Mark] = (),
    x_label: str = "step",
    y_label: str = "",
) -> str:
    """Draw lines by name, each of points (x, y), and marks; "" where no line has two points."""
    drawn = [(name, _finite(points)) for name, points in lines]
    drawn = [(name, thinned_points(points)) for name, points in drawn if len(points) > 1]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    x_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_axis = _Axis(min(ys), max(ys), LINE_HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x_axis, y_axis, LINE_HEIGHT, x_label, y_label)]
    parts += _marks([one for one in marks if x_axis.low <= one.x <= x_axis.high], x_axis, LINE_HEIGHT)
    for number, (name, points) in enumerate(drawn):
        path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line line{number % 4}" points="{path}"/>')
        if len(drawn) > 1:
            at = LEFT + 8 + 150 * number
            parts.append(f'<text class="legend line{number % 4}" x="{at}" y="14">{escape(name)}</text>')
    found = "; ".join(f"{name} from {p[0][1]:.4g} to {p[-1][1]:.4g}" for name, p in drawn)
    return _svg(title, f"{title}: {found}; {len(marks)} marks.", LINE_HEIGHT, parts)


def timeline(title: str, spans: Sequence[Span], marks: Sequence[Mark] = (), x_label: str = "seconds") -> str:
    """Draw spans, a row each, and marks; "" where there are no spans."""
    if not spans:
        return ""
    ends = [each for span in spans for each in (span.start, span.end)] + [mark.x for mark in marks]
    height = TOP + BOTTOM + ROW_HEIGHT * len(spans)
    axis = _Axis(min(ends), max(ends), LEFT, WIDTH - RIGHT)
    parts = [*_grid(axis, None, height, x_label, "")]
    for row, span in enumerate(spans):
        at, width = axis(span.start), max(1.5, axis(span.end) - axis(span.start))
        top = TOP + ROW_HEIGHT * row
        parts.append(
            f'<rect class="span" x="{at:.1f}" y="{top + 3}" width="{width:.1f}" height="{ROW_HEIGHT - 6}">'
            f"<title>{escape(span.text)}</title></rect>"
        )
        inside = at + width + 6 + 7 * len(span.label) < WIDTH
        x, anchor = (at + width + 5, "start") if inside else (at - 5, "end")
        place = f'x="{x:.1f}" y="{top + 15}" text-anchor="{anchor}"'
        parts.append(f'<text class="label" {place}>{escape(span.label)}</text>')
    parts += _marks(marks, axis, height)
    found = "; ".join(span.text for span in spans[:20])
    return _svg(title, f"{title}: {found}.", height, parts)


def stacked_bar(title: str, shares: Sequence[tuple[str, float]]) -> str:
    """Draw a bar of named parts, the width of each by its value; "" where they are nothing."""
    total = sum(value for _, value in shares)
    if total <= 0:
        return ""
    parts, at = [], 0.0
    for name, value in shares:
        width = WIDTH * value / total
        text = f"{name} {value / total:.1%}"
        parts.append(
            f'<rect class="share {escape(name)}" x="{at:.2f}" y="0" width="{width:.2f}" height="36">'
            f"<title>{escape(text)}</title></rect>"
        )
        if width > 8 * len(text):
            parts.append(f'<text class="on-share" x="{at + width / 2:.1f}" y="23">{escape(text)}</text>')
        at += width
    told = ", ".join(f"{name} {value / total:.1%}" for name, value in shares)
    return _svg(title, f"{title}: {told}.", 36, parts)


class _Axis:
    """Linear map of values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if high <= low:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start)


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _grid(x_axis: _Axis, y_axis: _Axis | None, height: float, x_label: str, y_label: str) -> Iterable[str]:
    floor = height - BOTTOM
    for value in ticks(x_axis.low, x_axis.high, 8):
        x = x_axis(value)
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{floor}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{floor + 14}" text-anchor="middle">{_number(value)}</text>'
    for value in ticks(y_axis.low, y_axis.high) if y_axis is not None else ():
        y = y_axis(value) if y_axis is not None else 0.0
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="tick" x="{middle}" y="{height - 4}" text-anchor="middle">{escape(x_label)}</text>'
    if y_label:
        yield f'<text class="tick" x="4" y="14">{escape(y_label)}</text>'


def _marks(marks: Sequence[Mark], axis: _Axis, height: float) -> Iterable[str]:
    for mark in marks[-MOST_MARKS:]:
        x = axis(mark.x)
        yield (
            f'<g class="mark {escape(mark.kind)}"><title>{escape(mark.text)}</title>'
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - BOTTOM}"/>'
            f'<text x="{x:.1f}" y="{TOP - 3}" text-anchor="middle">{escape(mark.letter)}</text></g>'
        )


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"


def _svg(title: str, description: str, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )
