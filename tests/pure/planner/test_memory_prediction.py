"""The predicted peak: trends, outliers, garbage, and what stands in for history."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picotron_ray.planner.memory_prediction import (
    GROWTH,
    MOST_GROWTH,
    predicted_class,
    predicted_peak,
    ratio_of,
)

pytestmark = pytest.mark.pure


def test_a_steady_peak_stays() -> None:
    assert predicted_peak([(step, 1e9) for step in range(0, 1000, 100)], 2000) == 1e9


def test_a_leak_is_seen_coming() -> None:
    """One MB a step, 1 GB at step 900: 1.1 GB a hundred steps later."""
    leak = [(step, 1e8 + 1e6 * step) for step in range(0, 1000, 100)]
    assert predicted_peak(leak, 1000) == pytest.approx(1.1e9)


def test_one_outlier_makes_no_trend_but_counts() -> None:
    steady = [(step, 1e9) for step in range(0, 1000, 100)]
    steady[7] = (700, 1.3e9)
    assert predicted_peak(steady, 5000) == pytest.approx(1.3e9)


def test_a_line_is_not_believed_for_ever() -> None:
    assert predicted_peak([(step, 1e9 + 1e8 * step) for step in range(4)], 10**9) == MOST_GROWTH * 1.3e9


def test_what_shrinks_may_come_back() -> None:
    assert predicted_peak([(step, 1e9 - 1e6 * step) for step in range(10)], 100) == 1e9


def test_few_measurements_say_nothing_of_a_trend() -> None:
    assert predicted_peak([], 10) == 0
    assert predicted_peak([(1, 1e9), (2, 2e9)], 10) == pytest.approx(2e9 * GROWTH["temporary"])
    assert predicted_peak([(5, 1e9)] * 10, 10) == pytest.approx(1e9 * GROWTH["temporary"])


def test_garbage_is_left_out() -> None:
    garbage = [(1, math.nan), (2, math.inf), (3, -5.0)]
    assert predicted_peak(garbage, 10) == 0
    good = [(step, 1e9) for step in range(4)]
    assert predicted_peak([*good, *garbage], 10) == 1e9


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.floats(allow_nan=True, allow_infinity=True)), max_size=40),
    st.integers(0, 10**12),
)
def test_it_is_finite_and_within_what_was_seen(measured: list[tuple[int, float]], step: int) -> None:
    found = predicted_peak(measured, step)
    known = [size for _, size in measured if math.isfinite(size) and size >= 0]
    assert 0 <= found <= max(MOST_GROWTH * max(known), 0.0) if known else found == 0
    assert math.isfinite(found) or max(known) > 1e307


@pytest.mark.parametrize(
    ("kind", "factor"), [("activation", 1.2), ("gradient", 1.2), ("optimizer", 1.1), ("temporary", 1.3)]
)
def test_a_class_without_history_grows_by_its_factor(kind: str, factor: float) -> None:
    assert predicted_class(kind, 1e9, []) == pytest.approx(factor * 1e9)
    assert predicted_class(kind, 1e9, [math.nan, -1.0]) == pytest.approx(factor * 1e9)


def test_history_takes_the_place_of_the_factor() -> None:
    assert predicted_class("activation", 1e9, [0.8, 0.95, 0.9]) == pytest.approx(0.95e9)
    assert predicted_class("activation", 1e9, [50.0]) == pytest.approx(MOST_GROWTH * 1e9)
    assert ratio_of(math.inf, 1.0) is None
