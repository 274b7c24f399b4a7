"""Windows over steps, and what an agent makes of a page."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.runtime.node_agent.telemetry import Telemetry
from picotron_ray.runtime.telemetry_page import StepRow, TelemetryPage
from picotron_ray.runtime.telemetry_window import (
    KEY,
    LEAST_ROWS,
    SERIES,
    WARM_UP,
    WorkerFigures,
    figures_of,
    newest,
    window_of,
)
from tests.pure.runtime.test_telemetry_page import ROW


def rows(count: int, **given: Any) -> list[StepRow]:
    return [ROW._replace(row=i + 1, step=100 + i, ordinal=i, **given) for i in range(count)]


def test_a_window_is_what_statistics_says() -> None:
    values = [random.Random(3).uniform(0.1, 9.0) for _ in range(100)]
    found = window_of(values)
    assert found == pytest.approx(
        (statistics.fmean(values), max(values), min(values), statistics.pstdev(values))
    )
    assert window_of([2.5]) == (2.5, 2.5, 2.5, 0.0)


def test_first_steps_of_a_generation_count_for_nothing() -> None:
    warm = [row._replace(step_s=60.0 if row.ordinal < WARM_UP else 0.8) for row in rows(10)]
    found = figures_of(warm)
    assert found is not None
    assert (found.steps, found.last_step, found.series[0].max) == (10 - WARM_UP, 109, 0.8)
    assert figures_of(warm[:WARM_UP]) is None
    assert figures_of([]) is None


def test_an_interval_holds_its_own_steps_alone() -> None:
    """A step became slow: what is decided on must not be a mean with steps of an hour ago."""
    fast, slow = rows(60, step_s=0.1), rows(40, step_s=2.0)
    page = [*fast, *(row._replace(step=160 + at, ordinal=60 + at) for at, row in enumerate(slow))]
    assert len(newest(page, 60.0)) == 30
    assert {row.step_s for row in newest(page, 60.0)} == {2.0}
    assert newest(page, 1.0) == page[-LEAST_ROWS:]
    assert newest(page, 1e9) == page
    assert newest([], 60.0) == []
    sparse = [
        row._replace(step=4 * row.step) for row in rows(100, step_s=1.0)
    ]  # one step of four is measured
    assert len(newest(sparse, 60.0)) == 15


def test_phases_shares_and_means() -> None:
    found = figures_of(
        [*rows(WARM_UP + 1), ROW._replace(step=7, ordinal=9, rows=0, row_s=0.0, stage_s={1: 0.75, 3: 0.5})]
    )
    assert found is not None
    means = dict(zip(SERIES, (window.mean for window in found.series), strict=True))
    assert means == pytest.approx({"step": 0.8, **dict(zip(STEP_PHASES, ROW.phase_s, strict=True))})
    assert found.row_s == ROW.row_s, "a step without rows has no seconds per row"
    assert found.stage_s == {1: 0.5, 3: 0.5}
    assert found.utilization == pytest.approx((0.2 + 0.4 + 0.1) / 0.8)
    told = figures_of(rows(9), utilization=0.5)
    assert told is not None
    assert told.utilization == 0.5, "as NVML has it"


# --- an agent -----------------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> TelemetryPage:
    page = TelemetryPage(tmp_path / "w1.telemetry", "GPU-1")
    for row in rows(20):
        page.write(row)
    return page


class FakeMachine:
    """Stands in for a node's machine."""

    def __init__(self, utilizations: Callable[[], dict[str, float]] = dict) -> None:
        self.utilizations = utilizations

    def health(self) -> dict[str, float]:
        return {"host_cpu_ratio": 0.5, "xid_errors_total": 2.0}


def beat(**given: Any) -> list[dict[str, Any]]:
    return [{"worker": "w1", "pid": os.getpid(), "term": ROW.term, "n": ROW.n} | given, {"worker": "w2"}]


def told(found: list[dict[str, Any]]) -> list[WorkerFigures]:
    return [entry[KEY] for entry in found if KEY in entry]


def test_figures_come_along_once_per_interval(tmp_path: Path, page: TelemetryPage) -> None:
    agent = Telemetry(tmp_path, 10.0, FakeMachine())
    due = [now for now in range(100, 141) if told(agent.added(beat(), float(now)))]
    assert due == [110, 120, 130, 140]
    assert beat()[0].keys() == agent.added(beat(), 141.0)[0].keys()


def test_one_worker_of_a_node_carries_its_machines_health(tmp_path: Path, page: TelemetryPage) -> None:
    agent = Telemetry(tmp_path, 1.0, FakeMachine())
    agent.added(beat(), 0.0)
    (one,) = told(agent.added(beat(), 1.0))
    assert one.health == {"host_cpu_ratio": 0.5, "xid_errors_total": 2.0}
    assert agent._with_health([{"worker": "w2"}]) == [{"worker": "w2"}]


def test_a_null_interval_reads_nothing(tmp_path: Path, page: TelemetryPage) -> None:
    def never() -> dict[str, float]:
        raise AssertionError("asked")

    agent = Telemetry(tmp_path, None, FakeMachine(never))
    assert [told(agent.added(beat(), now)) for now in (0.0, 1e9)] == [[], []]


@pytest.mark.parametrize("other", [{"pid": 1}, {"n": ROW.n + 1}, {"term": ROW.term - 1}, {"worker": "w9"}])
def test_a_page_of_another_process_or_generation_is_not_sent(
    tmp_path: Path, page: TelemetryPage, other: dict[str, Any]
) -> None:
    agent = Telemetry(tmp_path, 1.0, FakeMachine())
    agent.added(beat(), 0.0)
    assert told(agent.added(beat(**other), 1.0)) == []


def test_utilization_is_that_of_the_workers_own_gpu(tmp_path: Path, page: TelemetryPage) -> None:
    shares = iter([0.2, 0.4, 0.9])
    agent = Telemetry(tmp_path, 3.0, FakeMachine(lambda: {"GPU-0": 0.0, "GPU-1": next(shares)}))
    found = [one for now in (0.0, 1.0, 3.0) for one in told(agent.added(beat(), now))]
    assert [one.utilization for one in found] == [pytest.approx(0.5)]


def test_an_error_costs_no_heartbeat(
    tmp_path: Path, page: TelemetryPage, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("driver")

    agent = Telemetry(tmp_path, 1.0, FakeMachine(broken))
    assert agent.added(beat(), 5.0) == beat()
    assert "driver" in caplog.text
