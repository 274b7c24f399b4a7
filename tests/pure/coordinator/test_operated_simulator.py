"""Simulated runs with operators: orders hold over faults and coordinators; planted mistakes are caught."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.coordinator import event_handlers, machine, operator_orders, recovery, term_begin
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.operated import simulate_operated
from picotron_ray.coordinator.states import MachineState
from tests.support.simulation.mutations import Mutations

SEEDS = 40
FEW = 300  # seeds within which a planted mutation must be caught
QUICK = ("a_pause_ends_with_the_coordinator", "a_recovery_launches_in_a_pause")  # within a few seeds


def sweep(seeds: range) -> Coverage:
    """Coverage of all seeds; fails with the first that broke an invariant."""
    coverage = Coverage()
    answers = {"accepted": 0, "refused": 0}
    for seed in seeds:
        report, standing = simulate_operated(seed, coverage)
        assert not report.failures, f"seed {seed} ({', '.join(report.faults)}): {report.failures[0]}"
        answers = {kind: count + standing.answers[kind] for kind, count in answers.items()}
    assert answers["accepted"] > 2 * len(seeds)
    assert answers["refused"] > 0
    return coverage


def test_orders_hold_and_the_invariants_too() -> None:
    coverage = sweep(range(SEEDS))
    seen = {pair for pair, _ in coverage.counts}
    paused = MachineState.PAUSED
    assert {(MachineState.COLLECTING, paused), (paused, MachineState.STARTING)} <= seen
    assert (paused, MachineState.COLLECTING) in seen, "a node joined, or the time limit ended a pause"


@pytest.mark.parametrize("seed", [45, 133, 232, 236])
def test_seeds_that_found_something_stay_well(seed: int) -> None:
    """A drained node that came back with a term, a size that no layout has, a member stuck at the limit."""
    assert simulate_operated(seed)[0].failures == ()


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_two_thousand_runs_keep_the_invariants() -> None:
    sweep(range(SEEDS, 2200))


def test_a_seed_is_the_same_each_time() -> None:
    assert simulate_operated(7)[0] == simulate_operated(7)[0]


# --- planted mutations -------------------------------------------------------------------------------

MUTATIONS = Mutations()


@MUTATIONS.plant
def a_pause_ends_with_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(term_begin, "take_orders", lambda memory, event: None)


@MUTATIONS.plant
def a_recovery_launches_in_a_pause(patch: pytest.MonkeyPatch) -> None:
    def rest(memory: MachineMemory, point: Any) -> None:
        picked = recovery.pick(memory)
        if picked is None:
            memory.go(MachineState.WAITING)
        else:
            recovery._launch(memory, point, "", (), *picked)

    patch.setattr(recovery, "rest", rest)


@MUTATIONS.plant
def paused_workers_keep_their_devices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "end_workers", lambda memory: None)


@MUTATIONS.plant
def a_node_that_was_sent_away_is_used_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(event_handlers, "send_away_again", lambda memory, node: None)
    patch.setattr(term_begin, "send_away_again", lambda memory, node: None)


@MUTATIONS.plant
def a_new_size_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = operator_orders._set_sizes

    def once(memory: MachineMemory, least: int, most: int) -> None:
        if memory.state is not MachineState.NEW:
            real(memory, least, most)

    patch.setattr(operator_orders, "_set_sizes", once)


@MUTATIONS.plant
def the_time_limit_passes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "watch_limit", lambda memory: None)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in MUTATIONS]
)
def test_a_planted_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "the_time_limit_passes_unnoticed":
        monkeypatch.setattr("picotron_ray.coordinator.simulator.operated.LIMITED", 1.0)
    MUTATIONS[name](monkeypatch)
    for seed in range(FEW):
        try:
            failures = simulate_operated(seed)[0].failures
        except (AssertionError, KeyError, IndexError, RuntimeError) as error:
            failures = (f"{type(error).__name__}: {error}",)
        if failures:
            return
    pytest.fail(f"{FEW} seeds did not notice: {name}")
