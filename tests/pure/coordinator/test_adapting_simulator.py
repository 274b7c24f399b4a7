"""Simulated runs that adapt: decisions are few, come in healthy generations alone, survive, and replay."""

from __future__ import annotations

import pytest

from picotron_ray.coordinator.simulator.adapting import simulate_adapting
from picotron_ray.coordinator.simulator.changes import STAGES

SEEDS = 12


def sweep(seeds: range, kill_at: str = "") -> list[int]:
    """Changes of each seed; fails with the first that broke an invariant."""
    made = []
    for seed in seeds:
        report, changes = simulate_adapting(seed, kill_at)
        assert not report.failures, f"seed {seed} ({', '.join(report.faults)}): {report.failures[0]}"
        made.append(changes)
    return made


def test_runs_adapt_and_keep_the_invariants() -> None:
    made = sweep(range(SEEDS))
    assert sum(changes > 0 for changes in made) > 0.8 * SEEDS
    assert max(made) <= 12


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_outlives_its_coordinator(stage: str) -> None:
    sweep(range(2), stage)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_a_thousand_runs_keep_the_invariants() -> None:
    sweep(range(SEEDS, 1000))


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", STAGES)
def test_a_hundred_changes_outlive_their_coordinators(stage: str) -> None:
    sweep(range(2, 100), stage)


def test_a_seed_is_the_same_each_time() -> None:
    assert simulate_adapting(7) == simulate_adapting(7)
