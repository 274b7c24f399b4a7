"""Charts and pages of reports: bounded in size, and sound whatever the figures are."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from picotron_ray.observability.goodput import CAUSES, FAILURE_CAUSES
from picotron_ray.observability.report.page import MOST_ROWS, report_page
from picotron_ray.observability.report.svg import Mark, Span, line_chart, stacked_bar, ticks, timeline


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0, 1e12], [-3.0, 5.0, math.nan, math.inf], [1e-9, 2e-9]])
def test_a_line_is_drawn_within_its_frame(values: list[float]) -> None:
    marks = [Mark(1.0, "failure", "F", '<script>"&'), Mark(99.0, "failure", "F", "outside")]
    drawn = line_chart("a & b", [("one", list(enumerate(values)))], marks)
    root = ElementTree.fromstring(drawn)
    points = next(one.get("points") or "" for one in root.iter() if one.tag == "polyline")
    places = [tuple(map(float, pair.split(","))) for pair in points.split()]
    assert all(0 <= x <= 880 and 0 <= y <= 240 for x, y in places)
    assert "outside" not in drawn
    assert (root.get("role"), root.get("aria-label")) == ("img", "a & b")


def test_charts_without_figures_are_none() -> None:
    assert line_chart("x", [("one", [(1.0, 2.0)])]) == ""
    assert timeline("x", []) == stacked_bar("x", [("a", 0.0)]) == ""


def test_long_lines_and_many_marks_are_thinned() -> None:
    points = [(float(at), math.sin(at)) for at in range(100_000)]
    marks = [Mark(float(at), "commit", ".", "x") for at in range(10_000)]
    assert len(line_chart("x", [("one", points)], marks)) < 100_000


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(97.0, 1203.0) == [500, 1000]
    assert ticks(5.0, 5.0) == [5.0]


def test_the_shares_of_a_bar_fill_it() -> None:
    root = ElementTree.fromstring(stacked_bar("x", [("steps", 3.0), ("detect", 1.0)]))
    assert sum(float(one.get("width") or 0) for one in root.iter() if one.tag == "rect") == pytest.approx(880)


def test_spans_are_drawn_where_they_are() -> None:
    root = ElementTree.fromstring(timeline("x", [Span(0, 10, "a", "a"), Span(10, 20, "b", "b")]))
    first, second = (one for one in root.iter() if one.tag == "rect")
    end = float(first.get("x") or 0) + float(first.get("width") or 0)
    assert end == pytest.approx(float(second.get("x") or 0), abs=0.2)


def test_a_report_of_ten_thousand_failures_is_bounded() -> None:
    failure: dict[str, Any] = {"kind": "hang", "target": "w", "step": 5, "detected_s": 1.0, "lost_steps": 1}
    failure |= {"restored_from": "slots", "recovered_s": 2.0, **{f"{c}_s": 0.4 for c in FAILURE_CAUSES}}
    generation = {"term": 1, "n": 1, "layout": "dp2", "workers": 2, "start_step": 0, "end_step": 5}
    generation |= {"reason": "x", "predicted_s": None, "measured_s": None, "began_at_s": 1.0}
    account = {
        **dict.fromkeys(("loss", "eval_loss", "baseline_loss", "goodput", "updated_s", "ledger")),
        "run": "long",
        "storage": "here",
        "state": "running",
        "step": 5,
        "steps": 9,
        "began_at_s": 1.0,
        "wall_s": 9e5,
        "seconds": {**dict.fromkeys(CAUSES, 1.0)},
        "recoveries": [],
        "complaints": [],
        "failures": [failure] * 10_000,
        "generations": [generation] * 10_000,
        "environment": {},
        "checkpoints": [{"step": step} for step in range(10_000)],
    }
    events = [{"t": 1.0, "level": "info", "kind": "x", "text": "<b>"}] * 10_000
    page = report_page(account, {}, [], events, [])
    assert len(page) < 600_000
    assert page.count("<tr>") < 4 * (MOST_ROWS + 20)
    assert "<b>" not in page
