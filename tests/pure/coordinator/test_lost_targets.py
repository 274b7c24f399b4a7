"""States that are damaged when a run goes back to them, and launches that ask for the same step again."""

from __future__ import annotations

from collections import Counter

import pytest

from picotron_ray.coordinator.simulator.lost_targets import simulate_lost_target
from tests.support.faults.machine_judge import judge
from tests.support.faults.machine_mutations import TARGETS

SEEDS = 150


def test_nothing_committed_is_given_up_for_a_state_that_is_lost_for_any_seed() -> None:
    reports = [simulate_lost_target(seed) for seed in range(SEEDS)]
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])
    struck = Counter((name, report.seed % 2) for report in reports for name in set(report.faults))
    assert min(struck["damaged", 0], struck["damaged", 1], struck["relaunch", 1], struck["without", 1]) >= 10
    assert reports[7] == simulate_lost_target(7), "a seed replays"


@pytest.mark.deep
@pytest.mark.parametrize("name", list(TARGETS))
def test_a_planted_mutation_is_noticed(name: str) -> None:
    _, seed, _ = judge(60, name)
    assert seed is not None
