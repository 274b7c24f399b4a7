"""Timeline of one step's memory by class as an HTML file that needs nothing else. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from picotron_ray.config.schema.memory import MEMORY_CLASSES

WIDTH, HEIGHT, LEFT, TOP = 1000, 420, 80, 40
MOST_POINTS = 800
COLOURS = dict(zip(MEMORY_CLASSES, ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#9c755f"), strict=True))
STYLE = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}svg{max-width:100%}"


def thinned(points: Sequence[tuple[float, Sequence[int]]], most: int = MOST_POINTS) -> list[Any]:
    """At most ``most`` points, of each stretch the one with most bytes: no peak is lost."""
    if len(points) <= most:
        return [[at, list(sizes)] for at, sizes in points]
    cuts = [len(points) * number // most for number in range(most + 1)]
    highest = (max(points[a:b], key=lambda point: sum(point[1])) for a, b in pairwise(cuts))
    return [[at, list(sizes)] for at, sizes in highest]


def as_html(title: str, memory: Mapping[str, Any]) -> str:
    """Page with the areas of all classes over the time of a step, and a table of their bytes.

    Args:
        memory: ``timeline`` of `thinned` points, ``phases``, ``peak_bytes``, ``by_class`` and ``most``.
    """
    name = html.escape(title)
    return (
        f"<!doctype html><meta charset=utf-8><title>{name}</title><style>{STYLE}</style><h1>{name}</h1>"
        f"<p>Tensors of one step, {memory['peak_bytes'] / 1e6:,.1f} MB at its highest moment.</p>"
        f"{_plot(memory)}{_table(memory)}\n"
    )


def _plot(memory: Mapping[str, Any]) -> str:
    points = memory["timeline"]
    if not points:
        return "<p>Nothing was allocated.</p>"
    first, end = points[0][0], points[-1][0]
    top = max(1, memory["peak_bytes"])

    def x(at: float) -> float:
        return LEFT + WIDTH * (at - first) / max(end - first, 1e-9)

    def y(nbytes: float) -> float:
        return TOP + HEIGHT * (1 - nbytes / top)

    parts = [f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 40}">']
    below = [0.0] * len(points)
    for place, kind in enumerate(MEMORY_CLASSES):
        above = [base + sizes[place] for base, (_, sizes) in zip(below, points, strict=True)]
        upper = _steps([(x(at), y(high)) for (at, _), high in zip(points, above, strict=True)])
        lower = _steps([(x(at), y(low)) for (at, _), low in zip(points, below, strict=True)])
        outline = " ".join(f"{px:.1f},{py:.1f}" for px, py in (*upper, *reversed(lower)))
        parts.append(f'<polygon fill="{COLOURS[kind]}" points="{outline}"><title>{kind}</title></polygon>')
        below = above
    for at, phase in memory["phases"]:
        if first <= at <= end:
            line = f'x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{TOP + HEIGHT}"'
            parts.append(f'<line {line} stroke="#333" stroke-dasharray="3 3"/>')
            parts.append(f'<text x="{x(at) + 3:.1f}" y="{TOP - 6}">{html.escape(phase)}</text>')
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<text x="4" y="{y(share * top) + 5:.0f}">{share * top / 1e6:,.1f} MB</text>')
    parts.append(
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 24}">{1e3 * (end - first):,.1f} ms, traced</text></svg>'
    )
    return "".join(parts)


def _steps(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Path that stays at each height until the next one."""
    path: list[tuple[float, float]] = []
    for px, py in corners:
        if path:
            path.append((px, path[-1][1]))
        path.append((px, py))
    return path


def _table(memory: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th style="color:{COLOURS[kind]}">{kind}</th><td>{memory["by_class"][kind]:,}</td>'
        f"<td>{memory['most'][kind]:,}</td></tr>"
        for kind in MEMORY_CLASSES
    )
    return f"<table><tr><th></th><th>bytes at the peak</th><th>at its own</th></tr>{rows}</table>"
