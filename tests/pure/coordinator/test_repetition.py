"""Failures that repeat: the breaker climbs, starts anew after progress, gives up; a run told to go back."""

from __future__ import annotations

import pytest

from picotron_ray.coordinator.simulator.repetition import KINDS, simulate_repetition
from tests.support.faults.machine_judge import judge

SEEDS = 150


def test_the_breaker_climbs_as_far_as_it_takes_for_every_seed() -> None:
    reports = [simulate_repetition(seed) for seed in range(SEEDS)]
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])
    assert {report.faults[0] for report in reports} == set(KINDS)
    assert reports[7] == simulate_repetition(7), "a seed replays"


def test_a_rung_of_the_ladder_keeps_what_the_one_below_it_changed() -> None:
    """Bad host memory: after the last commit was used, fewer workers must not go back to that memory."""
    assert simulate_repetition(127).failures == ()


@pytest.mark.deep
@pytest.mark.parametrize(
    "name", ["the_breaker_never_resets", "the_breaker_never_gives_up", "the_breaker_always_says_retry"]
)
def test_a_mutation_of_the_breaker_is_noticed(name: str) -> None:
    _, seed, _ = judge(20, name)
    assert seed is not None
