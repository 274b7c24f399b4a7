"""The live view of ranks: the slowest first, bounded, and plain about what is not measured."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.telemetry import RunTelemetry
from picotron_ray.runtime.driver.top_view import MOST_ROWS, summary_text, top_rows, top_view
from picotron_ray.runtime.telemetry_page import MemoryFigures
from picotron_ray.runtime.telemetry_window import SERIES, Window, WorkerFigures


def status_of(ranks: int, slow: int | None, waits_seen: bool = True) -> dict[str, Any]:
    """Status of a run in which one rank's forward takes 0.9 s longer."""
    record = RunRecord(JobConfig(name="many"))
    members = tuple(m.Member(f"w{rank}", f"n{rank // 8}") for rank in range(ranks))
    spec = m.GenerationSpec(m.GenerationId(1, 1), members, Layout(dp=ranks), m.Source("init", 0), "")
    record.observe(m.Tick(), [m.RunGeneration(spec)], 0.0)
    telemetry = RunTelemetry(10.0, record)
    for rank in range(ranks):
        own = {"step": 2.0, "forward": 0.5 + (0.9 if rank == slow else 0.0), "sync": 0.1}
        series = tuple(Window(own.get(name, 0.0), 1.0, 0.0, 0.1) for name in SERIES)
        known: Any = {"sent_bytes": (0.0,) * 5, "memory": MemoryFigures(1, 2, 3 << 30, 4, 4 << 30)}
        figures = WorkerFigures(1, 1, rank, 9, 9, series, utilization=0.5, waits_seen=waits_seen, **known)
        telemetry.take(spec, [figures], 0.0)
    list(telemetry.due(spec, 1.0))
    return record.status(0, most_pages=256)


def shown(status: dict[str, Any], width: int = 240) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(top_view(status, width))
    return out.getvalue()


def test_of_a_thousand_ranks_the_slowest_are_shown_and_a_summary() -> None:
    status = status_of(1000, slow=617)
    rows = top_rows(status)
    assert len(rows) == MOST_ROWS
    assert (rows[0]["rank"], rows[0]["worker"], rows[0]["slow_in"]) == (617, "w617", "forward")
    assert rows[0]["score"] == pytest.approx(2.8)
    assert rows[0]["memory_ratio"] == pytest.approx(0.75)
    text = shown(status)
    assert "1000 ranks, a step 2 s" in text
    assert "and 980 faster ranks" in text
    assert len(text.splitlines()) < MOST_ROWS + 8


def test_on_a_narrow_terminal_a_rank_has_its_longest_phase() -> None:
    line = next(line for line in shown(status_of(4, slow=2), 80).splitlines() if "w2" in line)
    words = ["2", "w2", "2.80", "forward", "2.000", "forward", "1.400", "50%", "3.00", "75%"]
    assert line.split() == words
    assert len(line.rstrip()) <= 80


def test_on_eighty_columns_nothing_is_cut() -> None:
    """The memory was: ``0.59 GiB …``."""
    status = status_of(16, slow=12)
    for page in status["pages"].values():
        page["phase"] = "optimizer"
    text = shown(status, 80)
    assert "…" not in text
    assert text.count("3.00 75%") == 16


def test_a_rank_that_is_not_slow_is_slow_in_nothing() -> None:
    """One of score 1.00 was said to be slow in forward."""
    rows = top_rows(status_of(4, slow=2))
    assert [row["slow_in"] for row in rows] == ["forward", "", "", ""]
    status = status_of(2, None)
    status["telemetry"]["slow_ranks"][0] |= {"phase": "forward", "ratio": 1.0}
    assert top_rows(status)[0]["slow_in"] == ""


def test_without_a_round_ranks_are_shown_by_their_heartbeats() -> None:
    status = {**status_of(2, None), "telemetry": None}
    assert [row["worker"] for row in top_rows(status)] == ["w0", "w1"]
    assert "no telemetry yet" in "\n".join(summary_text(status))
    assert "w1" in shown(status)


def test_where_waits_are_not_seen_nobody_has_a_score() -> None:
    status = status_of(4, slow=2, waits_seen=False)
    assert [row["score"] for row in top_rows(status)] == [None] * 4
    assert "not measured here" in shown(status)
