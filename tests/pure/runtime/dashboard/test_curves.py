"""Curves stay bounded, hide no spike, and forget what a rewind made void."""

from __future__ import annotations

import pytest

from picotron_ray.runtime.dashboard.curves import MOST, Curves, goodput, thinned


def test_a_run_that_goes_back_makes_later_steps_void() -> None:
    curves = Curves()
    for step in (1, 2, 3, 4):
        curves.add(step, {"loss": float(step)})
    curves.add(3, {"loss": 9.0})
    assert curves.all("loss") == [(1, 1.0), (2, 2.0), (3, 9.0)]
    curves.add(4, {"loss": 4.5})
    assert curves.newest("loss") == 4.5


def test_what_storage_tells_later_replaces_and_voids_nothing() -> None:
    curves = Curves()
    curves.add(5, {"loss": 5.0})
    curves.fill([(2, {"loss": 2.0}), (5, {"loss": 5.5})])
    assert curves.all("loss") == [(2, 2.0), (5, 5.5)]


def test_the_room_is_bounded_and_the_newest_point_stays() -> None:
    curves = Curves()
    for step in range(10 * MOST):
        curves.add(step, {"loss": 1.0})
    assert len(curves.all("loss")) <= MOST
    assert curves.all("loss")[-1][0] == 10 * MOST - 1
    assert len(curves.shown("loss")) <= 600


def test_a_single_spike_is_shown() -> None:
    points = [(step, 50.0 if step == 7777 else 2.0) for step in range(20_000)]
    assert [7777, 50.0] in thinned(points, 600)


def test_goodput_counts_the_time_that_a_failure_took() -> None:
    times = [(step, 100.0 + step) for step in range(1, 11)]
    assert goodput(times, 100.0)[-1] == (10, 1.0)
    times += [(step, 110.0 + step) for step in range(11, 21)]  # ten seconds away
    assert goodput(times, 100.0)[-1] == (20, pytest.approx(2 / 3))
    assert goodput([(1, 5.0)], 0.0) == []
