"""Rounds of telemetry: figures of ranks become those of a run's replicas and stages, once per interval."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, encode
from picotron_ray.layout.layout import Coordinates, Layout
from picotron_ray.observability.windows import TelemetryWindow
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.telemetry import MOST_SHOWN, Round, RunTelemetry
from picotron_ray.runtime.driver.console import telemetry_lines
from picotron_ray.runtime.telemetry_page import MemoryFigures
from picotron_ray.runtime.telemetry_window import SERIES, Window, WorkerFigures, window_of

LAYOUT = Layout(dp=2, pp=2, tp=2)


def spec(layout: Layout = LAYOUT, n: int = 1) -> m.GenerationSpec:
    members = tuple(m.Member(f"w{rank}", f"n{rank // 2}") for rank in range(layout.world_size))
    return m.GenerationSpec(m.GenerationId(3, n), members, layout, m.Source("init", 0), "")


def worker(rank: int, layout: Layout = LAYOUT, n: int = 1, **given: Any) -> WorkerFigures:
    at = layout.coordinates(rank)
    known: dict[str, Any] = {
        "series": tuple(Window(1.0 + rank, 2.0 + rank, 0.5, 0.25) for _ in SERIES),
        "row_s": 0.1 + 0.01 * rank,
        "rows": 4 + at.dp,
        "stage_s": dict.fromkeys(layout.rank_stages(at.pp), 0.5 * (1 + at.pp)),
        "sent_bytes": (100.0 * (1 + rank), 0.0, 7.0, 0.0, 0.0),
        "memory": MemoryFigures(10, 20, 30 + rank, 50 - rank, 100),
        "utilization": 0.5,
    }
    return WorkerFigures(3, n, rank, 90, 200 + rank, **{**known, **given})


@pytest.fixture
def record() -> RunRecord:
    return RunRecord(JobConfig())


@pytest.fixture
def run(record: RunRecord) -> RunTelemetry:
    return RunTelemetry(10.0, record)


def test_a_round_ends_with_the_last_rank(run: RunTelemetry, record: RunRecord) -> None:
    run.take(spec(), [worker(rank) for rank in range(7)], 0.0)
    assert list(run.due(spec(), 9.9)) == []
    assert record.status(0)["telemetry"] is None
    run.take(spec(), [worker(7)], 9.9)
    (event,) = run.due(spec(), 9.9)
    figures = event.figures
    assert (event.generation, figures.ranks, figures.last_step) == (spec().id, 8, 207)
    assert figures.step_s == pytest.approx(4.5)
    assert figures.phase_s == pytest.approx(dict.fromkeys(STEP_PHASES, 4.5))
    slowest = [max(r for r in range(8) if LAYOUT.coordinates(r).dp == dp) for dp in range(2)]
    assert figures.replica_row_s == pytest.approx([0.1 + 0.01 * rank for rank in slowest])
    assert figures.replica_rows == (4, 5)
    assert figures.stage_s == (0.5, 1.0)
    assert figures.sent_bytes == {"dp": 450.0, "pp": 7.0}
    assert (figures.peak_bytes, figures.device_bytes, figures.utilization) == (37, 100, 0.5)
    assert decode(json.loads(json.dumps(encode(event)))) == event
    assert list(run.due(spec(), 10.0)) == [], "once"
    told = record.status(0)["telemetry"]
    assert told["step_s"].keys() == told["phase_s"]["bubble"].keys() == {"mean", "max", "min", "std"}
    assert (told["generation"], told["memory"]["largest_free_bytes"]) == ("3.1", 43)


def test_ranks_that_do_not_see_their_waits_measure_no_replica(run: RunTelemetry, record: RunRecord) -> None:
    """On CUDA a slow rank makes its peers' passes as long as its own: nobody is slower than others."""
    run.take(spec(), [worker(rank, waits_seen=rank != 3) for rank in range(8)], 0.0)
    (event,) = run.due(spec(), 1.0)
    assert (event.figures.waits_seen, event.figures.replica_row_s) == (False, ())
    assert event.figures.replica_rows == (4, 5)
    told = record.status(0)["telemetry"]
    assert (told["waits_seen"], told["replica_row_s"]) == (False, [])
    assert decode(json.loads(json.dumps(encode(event)))) == event
    assert telemetry_lines({"telemetry": told})[1].startswith("not measured: ")
    run.take(spec(), [worker(rank) for rank in range(8)], 2.0)
    (event,) = run.due(spec(), 2.0)
    assert len(telemetry_lines({"telemetry": record.status(0)["telemetry"]})) == 1


def test_after_an_interval_all_replicas_and_stages_do(run: RunTelemetry) -> None:
    some = [LAYOUT.rank(Coordinates(pp, dp, 0, 0)) for pp, dp in ((0, 0), (1, 1))]
    run.take(spec(), [worker(rank) for rank in some], 0.0)
    assert list(run.due(spec(), 9.9)) == []
    (event,) = run.due(spec(), 10.0)
    assert event.figures.ranks == 2


def test_after_two_intervals_what_there_is(run: RunTelemetry) -> None:
    run.take(spec(), [worker(0)], 0.0)
    assert list(run.due(spec(), 19.9)) == []
    (event,) = run.due(spec(), 20.0)
    assert (event.figures.ranks, event.figures.replica_row_s, event.figures.stage_s) == (
        1,
        (0.1, 0.0),
        (0.5, 0.0),
    )


def test_a_rank_counts_once_in_a_round(run: RunTelemetry) -> None:
    for now in (0.0, 9.0):
        run.take(spec(), [worker(0), worker(-1), worker(8)], now)
    (event,) = run.due(spec(), 20.0)
    assert event.figures.ranks == 1


def test_figures_of_other_generations_are_dropped(run: RunTelemetry) -> None:
    run.take(None, [worker(0)], 0.0)
    run.take(spec(n=2), [worker(rank) for rank in range(8)], 0.0)
    assert list(run.due(spec(n=2), 100.0)) == []
    run.take(spec(), [worker(rank) for rank in range(8)], 100.0)
    assert list(run.due(spec(n=2), 100.0)) == [], "they are of a generation that is over"
    assert list(run.due(spec(), 101.0)) == []


def test_stages_of_a_rank_that_are_unknown_are_left_out() -> None:
    round_ = Round(spec(Layout()), 0.0)
    round_.add(worker(0, Layout(), stage_s={0: 0.5, 7: 1.0, -1: 1.0}))
    assert round_.figures().stage_s == (0.5,)


def test_8000_ranks_take_the_room_of_their_replicas(run: RunTelemetry) -> None:
    layout = Layout(dp=100, pp=10, tp=8)
    big = spec(layout)
    began = time.perf_counter()
    for rank in range(layout.world_size):
        run.take(big, [worker(rank, layout)], 0.0)
    assert time.perf_counter() - began < 5.0, "0.2 s on one core"
    held = run._round
    assert held is not None
    sizes = [value for value in vars(held).values() if isinstance(value, list | bytearray)]
    assert sum(map(sys.getsizeof, sizes)) < 20_000
    (event,) = run.due(big, 0.0)
    assert (event.figures.ranks, len(event.figures.replica_row_s), len(event.figures.stage_s)) == (
        8000,
        100,
        10,
    )


def test_the_spread_of_many_ranks_is_exact() -> None:
    values = [[1.0, 2.0], [3.0, 7.0], [4.0, 4.0]]
    round_ = Round(spec(Layout(dp=3)), 0.0)
    for rank, each in enumerate(values):
        round_.add(worker(rank, Layout(dp=3), series=(window_of(each),) * len(SERIES)))
    assert round_._series[0].window == pytest.approx(window_of([v for each in values for v in each]))


def test_each_round_gives_a_window_to_whoever_listens(run: RunTelemetry, record: RunRecord) -> None:
    heard: list[TelemetryWindow] = []
    run.listeners.append(heard.append)
    for _ in range(2):
        run.take(spec(), [worker(rank) for rank in range(8)], 0.0)
        list(run.due(spec(), 1.0))
    figures = heard[0].figures
    assert (heard[0].generation, figures["step"], figures["step_s"]) == ("3.1", 207, 4.5)
    assert (figures["straggler_ratio"], heard[0].slowest[0].rank) == (pytest.approx(8 / 4.5), 7)
    assert run.newest is not None
    assert (run.newest[0].values[5, 0], run.newest[1]) == (6.0, "3.1")
    status = record.status(0)
    assert status["windows"]["step_s"]["samples"] == 2
    assert [row["rank"] for row in status["telemetry"]["slow_ranks"]] == list(range(7, -1, -1))
    assert json.loads(json.dumps(status["telemetry"])) == status["telemetry"]


def page(step: int, loss: float, rank: int = 0) -> dict[str, Any]:
    figures = {"loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "step_time_s": 0.5}
    return {"term": 3, "n": 1, "rank": rank, "step": step, **figures}


def test_a_step_is_sampled_once_however_many_heartbeats_show_it(run: RunTelemetry, record: RunRecord) -> None:
    for step, loss in ((4, 3.0), (4, 3.0), (5, 2.0)):
        run.take(spec(), [], 0.0, [page(step, loss), page(step + 9, 9.0, rank=1)])
    run.take(spec(n=2), [], 0.0, [page(6, 9.0)])
    found = record.status(0)["windows"]["loss"]
    assert (found["mean"], found["samples"]) == (2.5, 2)


def test_what_a_round_shows_does_not_grow_with_the_ranks(run: RunTelemetry, record: RunRecord) -> None:
    layout = Layout(dp=4096)
    run.take(spec(layout), [worker(rank, layout) for rank in range(4096)], 0.0)
    list(run.due(spec(layout), 1.0))
    told = record.status(0)["telemetry"]
    assert len(told["slow_ranks"]) == MOST_SHOWN
    assert told["slow_ranks"][0]["rank"] == 4095


def test_errors_of_gpus_count_as_they_come_whichever_nodes_are_heard(
    run: RunTelemetry, record: RunRecord
) -> None:
    told: list[float] = []
    layout = Layout(dp=4)
    rounds: list[dict[int, float]] = [
        {0: 2, 2: 3},
        {0: 2},
        {0: 2, 2: 3},
        {2: 4},
        {0: 2, 1: 2},
        {0: 3, 2: 0},
        {2: 1},
    ]
    for at, counts in enumerate(rounds):
        health = {rank: {"ecc_errors_total": value, "throttled_gpus": 1.0} for rank, value in counts.items()}
        ranks = [worker(rank, layout, health=health.get(rank, {})) for rank in range(4)]
        run.take(spec(layout), ranks, float(at))
        run.due(spec(layout), float(at))
        shown = record.status(0)["telemetry"]["health"]
        assert shown["throttled_gpus"] == len({rank // 2 for rank in counts}), "a node counts once"
        told.append(shown["ecc_errors_total"])
    assert told == [0, 0, 0, 1, 1, 2, 3]
