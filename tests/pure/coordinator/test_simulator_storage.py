"""Schedules of faults against the real code of storage, and of slots that a run keeps for its next launch.

A failing seed is printed; ``simulate_store(seed)`` and ``simulate_kept(seed)`` repeat it event for event.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from picotron_ray.coordinator.simulator.run import Report
from tests.support.faults.machine_judge import judge
from tests.support.simulation.kept_world import FATES, simulate_kept
from tests.support.simulation.store_world import simulate_store
from tests.support.simulation.sweep import broken, sweep

pytestmark = pytest.mark.timeout(400)  # seconds of work, but a busy machine may stretch them

SEEDS = max(1, int(os.environ.get("PICOTRON_SIMULATOR_SEEDS", "1000")) // 10)
SIMULATIONS = (simulate_store, simulate_kept)


@pytest.mark.parametrize("run", SIMULATIONS)
def test_invariants_hold_for_every_seed(
    run: Callable[[int], Report], capsys: pytest.CaptureFixture[str]
) -> None:
    reports = sweep(run, range(SEEDS))
    assert not broken(reports)
    struck = Counter(name for report in reports for name in set(report.faults))
    with capsys.disabled():
        told = ", ".join(f"{name} {count}" for name, count in sorted(struck.items()))
        print(f"\n{SEEDS} seeds of {run.__name__}, in how many each fault struck: {told}")
    often = {simulate_store: {"usurped", "undead", "rot"}, simulate_kept: set(FATES)}[run]
    assert min(struck[name] for name in often) >= 3


@pytest.mark.deep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("run", SIMULATIONS)
def test_invariants_hold_for_two_thousand_seeds(run: Callable[[int], Report]) -> None:
    assert not broken(sweep(run, range(SEEDS, 2000)))


@pytest.mark.parametrize("run", SIMULATIONS)
def test_a_seed_replays_to_the_last_event(run: Callable[[int], Report]) -> None:
    assert [run(seed) for seed in range(4)] == [run(seed) for seed in range(4)]


@pytest.mark.parametrize("seed", [104, 347, 571])
def test_seeds_that_found_something_stay_well(seed: int) -> None:
    assert simulate_store(seed).failures == ()


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    [
        "the_log_is_not_read_before_a_deletion",
        "a_rewind_finds_what_was_given_up",
        "one_damaged_commit_ends_later_ones",
        "no_commit_is_retired",
        "the_end_of_a_run_does_not_ask_the_log",
        "an_agent_obeys_any_term",
        "a_run_that_failed_keeps_nothing",
        "slots_of_another_run_are_taken_for_ones_own",
        "a_node_that_keeps_and_is_late_is_not_awaited",
    ],
)
def test_a_planted_mutation_is_noticed(name: str) -> None:
    """All of them are planted in ``.ci/long``."""
    _, seed, _ = judge(30, name)
    assert seed is not None
