"""A study's results for people: a line per trial, and one HTML file that needs nothing else."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, EDGE = 960, 320, 50
WIDE = 30
"""Largest number over smallest from which an axis is logarithmic."""
STYLE = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left}svg text{font-size:11px}"


def as_line(row: Mapping[str, Any]) -> str:
    """A trial on one line."""
    return (
        f"{row['trial']}  {row['status']:10}  {point_text(row)}  {short(row['tokens_per_s'])} tokens/s"
        f"  eval_loss {short(row['eval_loss'])}" + (f"  {row['reason']}" if row["reason"] else "")
    )


def point_text(row: Mapping[str, Any]) -> str:
    """A trial's point in one line, without the sections of its keys."""
    return " ".join(f"{key.rpartition('.')[2]}={short(value)}" for key, value in row["point"].items())


def short(value: Any) -> str:
    """A value in few letters."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def as_html(found: Mapping[str, Any]) -> str:
    """The page: parallel coordinates of all trials, the fronts of every two figures, and the table."""
    rows, names = found["trials"], found["objective"]
    keys = list(rows[0]["point"]) if rows else []
    parts = [
        f"<h1>{html.escape(found['study'])}</h1>",
        f"<p>{len(rows)} trials, {found['failed']} failed; best {found['best']['trial']}</p>",
        "<h2>Parallel coordinates</h2>",
        parallel(rows, keys, names, set(found["front"])),
    ]
    for x, y in itertools.combinations(names, 2):
        parts += [f"<h2>Front: {x}, {y}</h2>", scatter(rows, x, y, set(found["front"]))]
    parts += ["<h2>Trials</h2>", _table(rows, keys, names)]
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{''.join(parts)}\n"


def parallel(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str], best: set[str]
) -> str:
    """SVG with an axis per key of the points and per figure, and a line per finished trial."""
    done = [row for row in rows if row["status"] == "finished"]
    columns = [(key, [row["point"].get(key) for row in done]) for key in keys]
    columns += [(name, [row[name] for row in done]) for name in names]
    gap = (WIDTH - 2 * EDGE) / max(1, len(columns) - 1)
    heights = [_places(values) for _, values in columns]
    parts = []
    for at, (name, values) in enumerate(columns):
        x = EDGE + at * gap
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{EDGE}" y2="{HEIGHT - EDGE}" stroke="#999"/>')
        anchor = "start" if at == 0 else "end" if at == len(columns) - 1 else "middle"
        head = f"{html.escape(name.rpartition('.')[2])}<title>{html.escape(name)}</title>"
        parts.append(f'<text x="{x:.0f}" y="{30 - 14 * (at % 2)}" text-anchor="{anchor}">{head}</text>')
        ends = sorted(set(zip(heights[at], map(short, values), strict=True)))
        parts += [
            f'<text x="{x + 3:.0f}" y="{_y(share):.0f}">{html.escape(text)}</text>'
            for share, text in (ends if len(ends) <= 12 else [ends[0], ends[-1]])
        ]
    for place, row in enumerate(done):
        line = " ".join(f"{EDGE + at * gap:.0f},{_y(shares[place]):.0f}" for at, shares in enumerate(heights))
        colour = "#c22" if row["trial"] in best else "#48a"
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity=".7"/>')
    return _svg(parts)


def scatter(rows: Sequence[Mapping[str, Any]], x: str, y: str, best: set[str]) -> str:
    """SVG of the finished trials by two figures; those of the front in red."""
    done = [row for row in rows if row["status"] == "finished"]
    across, up = _places([row[x] for row in done]), _places([row[y] for row in done])
    parts = [
        f'<circle cx="{EDGE + share * (WIDTH - 2 * EDGE):.0f}" cy="{_y(height):.0f}" r="4"'
        f' fill="{"#c22" if row["trial"] in best else "#48a"}">'
        f"<title>{html.escape(as_line(row))}</title></circle>"
        for row, share, height in zip(done, across, up, strict=True)
    ]
    right, bottom = WIDTH - EDGE, HEIGHT - EDGE
    axes = [
        f'<path d="M{EDGE},{EDGE} V{bottom} H{right}" fill="none" stroke="#999"/>',
        f'<text x="{EDGE}" y="{EDGE - 10}">{html.escape(y)}</text>',
        f'<text x="{right}" y="{HEIGHT - 10}" text-anchor="end">{html.escape(x)}</text>',
    ]
    for row, share in zip(done, across, strict=True):
        if share in (min(across), max(across)):
            place = f'x="{EDGE + share * (right - EDGE):.0f}" y="{bottom + 15}" text-anchor="middle"'
            axes.append(f"<text {place}>{short(row[x])}</text>")
    for row, height in zip(done, up, strict=True):
        if height in (min(up), max(up)):
            axes.append(f'<text x="{EDGE - 4}" y="{_y(height):.0f}" text-anchor="end">{short(row[y])}</text>')
    return _svg([*axes, *parts])


def _places(values: Sequence[Any]) -> list[float]:
    """Each value's place on an axis, 0-1: numbers by size (wide ranges by logarithm), names by order."""
    if all(isinstance(value, int | float) for value in values):
        if values and min(values) > 0 and max(values) > WIDE * min(values):
            values = [math.log(value) for value in values]
        low, high = min(values, default=0), max(values, default=0)
        return [(value - low) / (high - low) if high > low else 0.5 for value in values]
    order = sorted(set(map(str, values)))
    return [order.index(str(value)) / max(1, len(order) - 1) for value in values]


def _y(share: float) -> float:
    return HEIGHT - EDGE - share * (HEIGHT - 2 * EDGE)


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">{"".join(parts)}</svg>'


def _table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("trial", "status", *keys, *names, "reason"))
    lines = []
    for row in rows:
        cells = [row["trial"], row["status"], *(row["point"].get(key) for key in keys)]
        cells += [*(row[name] for name in names), row["reason"]]
        lines.append("".join(f"<td>{html.escape(short(cell))}</td>" for cell in cells))
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
