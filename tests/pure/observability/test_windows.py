"""Windows of telemetry: flat figures, who is slow and in what, samples, and how old windows are thinned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from picotron_ray.observability.rank_table import COLUMNS, RankTable, row_of
from picotron_ray.observability.windows import (
    Samples,
    TelemetryWindow,
    known,
    series,
    thinned,
    window_of_round,
)


def told(**given: Any) -> dict[str, Any]:
    """A round as the run's status has it."""
    window = {"mean": 1.0, "max": 1.5, "min": 0.5, "std": 0.1}
    memory = {"allocated_bytes": 40, "reserved_bytes": 50, "peak_bytes": 60, "largest_free_bytes": 45}
    return {
        "generation": "1.2",
        "ranks": 4,
        "steps": 10,
        "last_step": 70,
        "step_s": window,
        "phase_s": {"forward": window, "sync": window},
        "sent_bytes": {"dp": 100.0},
        "memory": {**memory, "device_bytes": 100},
        "utilization": 0.0,
        "waits_seen": True,
        **given,
    }


def table(ranks: int, slow: int | None = None, phase: str = "backward") -> RankTable:
    """Ranks of a second a step; one is 0.5 s slower in a phase, for which the others wait."""
    found = RankTable(ranks)
    for rank in range(ranks):
        mine = {"step_s": 1.5, "forward_s": 0.3, "backward_s": 0.6, "optimizer_s": 0.1}
        if rank == slow:
            mine[f"{phase}_s"] = mine.get(f"{phase}_s", 0.0) + 0.5
        found.put(rank, row_of({**mine, "sync_s": 0.0 if rank == slow else 0.5}))
    return found


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_the_slow_rank_and_its_phase_are_named(phase: str) -> None:
    first, second = table(1000, 617, phase).slowest(2)
    assert (first.rank, first.phase) == (617, phase)
    assert (first.ratio, first.excess_s) == (pytest.approx(1.5), pytest.approx(0.5))
    assert (second.ratio, second.phase) == (pytest.approx(1.0), "")


def test_whoever_waits_for_others_is_not_slow() -> None:
    waiting = RankTable(3)
    for rank, waits_s in enumerate((0.0, 5.0, 9.0)):
        waiting.put(rank, row_of({"forward_s": 1.0, "reduce_s": waits_s, "bubble_s": waits_s}))
    assert [one.ratio for one in waiting.slowest(3)] == [1.0, 1.0, 1.0]


def test_ranks_that_were_not_heard_of_are_left_out() -> None:
    some = table(4, slow=3)
    some.values[1] = np.nan
    assert [one.rank for one in some.slowest(9)] == [3, 0, 2]
    assert some.rows([1])[0] == {"rank": 1, **dict.fromkeys(COLUMNS)}
    assert RankTable(5).slowest(1) == []


def test_a_table_of_16384_ranks_takes_a_megabyte() -> None:
    assert RankTable(16_384).values.nbytes < 1 << 20


def test_a_window_has_what_is_known_and_no_more() -> None:
    window = window_of_round(5.0, told(), {"loss": 2.5, "grad_norm": math.nan}, table(4, slow=2))
    figures = window.figures
    assert (window.at_s, window.generation, window.slowest[0].rank) == (5.0, "1.2", 2)
    assert (figures["step"], figures["step_s"], figures["forward_s"], figures["loss"]) == (70, 1.0, 1.0, 2.5)
    assert figures["sent_bytes.dp"] == 100.0
    assert figures["straggler_ratio"] == pytest.approx(1.5)
    assert figures["fragmentation_ratio"] == pytest.approx(1 - 45 / 60)
    assert not {"grad_norm", "utilization_ratio", "mfu_ratio"} & figures.keys()


def test_where_waits_are_not_seen_nobody_is_a_straggler() -> None:
    window = window_of_round(5.0, told(waits_seen=False), {}, table(4, slow=2))
    assert window.slowest == ()
    assert "straggler_ratio" not in window.figures


def test_memory_that_is_not_known_is_absent() -> None:
    unknown = dict.fromkeys(told()["memory"], 0)
    figures = window_of_round(5.0, told(memory=unknown), {}, table(1)).figures
    assert not {"peak_bytes", "device_bytes", "fragmentation_ratio"} & figures.keys()


def test_samples_are_the_newest_thousand() -> None:
    samples = Samples()
    for value in range(2500):
        samples.add({"loss": float(value)})
    samples.add({"grad_norm": 1.0})
    found = samples.windows()
    newest = np.arange(1500, 2500)
    assert found["loss"] == pytest.approx(
        {"mean": newest.mean(), "max": 2499, "min": 1500, "std": newest.std(), "samples": 1000}
    )
    assert found["grad_norm"]["samples"] == 1


def windows(count: int, generation: str = "1.1") -> list[TelemetryWindow]:
    return [
        TelemetryWindow(float(at), generation, {"step": at, "loss": float(at), "failures_total": at // 2})
        for at in range(count)
    ]


def test_thinned_windows_keep_means_and_the_newest_totals() -> None:
    found = thinned(windows(8), 4)
    assert [window.at_s for window in found] == [1, 3, 5, 7]
    assert [window.figures["loss"] for window in found] == [0.5, 2.5, 4.5, 6.5]
    assert [window.figures["step"] for window in found] == [1, 3, 5, 7]
    assert found[-1].figures["failures_total"] == 3
    assert thinned(windows(8), 9) == windows(8)
    assert len(thinned(windows(1000), 1)) == 1


def test_windows_of_two_generations_are_merged_last() -> None:
    both = [*windows(3, "1.1"), *windows(3, "1.2")]
    assert [window.generation for window in thinned(both, 4)] == ["1.1", "1.1", "1.2", "1.2"]
    assert len(thinned(both, 1)) == 1


def test_a_series_has_the_times_at_which_its_figure_is_known() -> None:
    some = [TelemetryWindow(1.0, "1.1", known({"loss": 2.0})), TelemetryWindow(2.0, "1.1", {})]
    assert series(some, "loss") == [(1.0, 2.0)]
