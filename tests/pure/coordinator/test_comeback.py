"""A node whose agent was replaced: what is pinned there is told before it joins, and counts all the same."""

from __future__ import annotations

from picotron_ray.coordinator.simulator.comeback import simulate_comeback
from tests.support.faults.machine_judge import judge

SEEDS = 60


def test_what_a_node_tells_before_it_joins_is_committed_or_released_for_every_seed() -> None:
    reports = [simulate_comeback(seed) for seed in range(SEEDS)]
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])
    assert reports[7] == simulate_comeback(7), "a seed replays"


def test_a_machine_that_forgets_it_is_noticed() -> None:
    _, seed, _ = judge(20, "what_a_node_tells_before_it_joins_is_forgotten")
    assert seed is not None
