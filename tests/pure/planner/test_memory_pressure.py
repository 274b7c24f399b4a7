"""Modes with their hysteresis, and the ladder rung by rung."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picotron_ray.planner.memory_pressure import BACK, MODES, PATIENCE, Ladder, MemoryReading, climb, mode_of

pytestmark = pytest.mark.pure


def reading(share: float, fragments: float = 0.0, device: int = 1000) -> MemoryReading:
    """Activations are freed between two steps: what is in use then is a tenth of what is reserved."""
    reserved = 100
    return MemoryReading(reserved // 10, reserved, 0, share * device, device, round(reserved * fragments))


@pytest.mark.parametrize(
    ("share", "mode"),
    [
        (0.0, MODES[0]),
        (0.7, MODES[0]),
        (0.701, MODES[1]),
        (0.9, MODES[1]),
        (0.901, MODES[2]),
        (5.0, MODES[2]),
    ],
)
def test_modes_begin_at_their_borders(share: float, mode: str) -> None:
    assert mode_of(share) == mode


def test_a_mode_is_not_left_by_a_hair() -> None:
    assert mode_of(0.9 - BACK + 0.001, MODES[2]) == MODES[2]
    assert mode_of(0.9 - BACK - 0.001, MODES[2]) == MODES[1]
    assert mode_of(0.7 - BACK + 0.001, MODES[1]) == MODES[1]
    assert mode_of(0.7 - BACK + 0.001, MODES[2]) == MODES[1]
    assert mode_of(0.1, MODES[2]) == MODES[0]


@given(st.floats(0, 2), st.sampled_from(MODES))
def test_a_share_that_stays_changes_a_mode_once(share: float, before: str) -> None:
    once = mode_of(share, before)  # type: ignore[arg-type]
    assert mode_of(share, once) == once


def climbed(*readings: MemoryReading) -> list[str]:
    ladder, rungs = Ladder(), []
    for each in readings:
        ladder, _ = climb(each, ladder)
        rungs.append(ladder.rung)
    return rungs


def test_nothing_is_done_without_trouble() -> None:
    assert climbed(*[reading(0.8, 0.3)] * 3) == ["nothing"] * 3


def test_fragments_alone_are_released_and_collected_and_no_more() -> None:
    assert climbed(*[reading(0.5, 0.31)] * 4) == ["release", "collect", "collect", "collect"]


def test_fragments_that_are_gone_take_the_ladder_to_its_foot() -> None:
    found = climbed(reading(0.5, 0.4), reading(0.5, 0.25), reading(0.5, 0.19), reading(0.5, 0.25))
    assert found == ["release", "collect", "nothing", "nothing"]


def test_pressure_asks_for_less_and_refuses_only_what_will_not_fit() -> None:
    assert climbed(*[reading(0.95)] * 8)[-4:] == ["ask"] * 4
    over = climbed(*[reading(1.05)] * (3 + PATIENCE))
    assert over == ["release", "collect", *["ask"] * PATIENCE, "refuse"]


def test_pressure_that_is_relieved_is_forgotten() -> None:
    over, fine = [reading(1.05)] * (2 + PATIENCE), reading(0.5)
    assert "refuse" not in climbed(*over, fine, *over)


def test_the_reason_has_the_numbers() -> None:
    _, words = climb(MemoryReading(20, 100, 90, 990.0, 1000, 50), Ladder())
    assert "50% fragments" in words
    assert climb(reading(0.1), Ladder())[1] == ""


def test_an_unknown_device_and_an_empty_allocator_are_no_trouble() -> None:
    assert climbed(MemoryReading(0, 0, 10**12, 1e15, 0, 0)) == ["nothing"]
