"""Simulated runs that people hold and debug: no hold is a part of a step; planted mistakes are caught."""

from __future__ import annotations

import pytest

from picotron_ray.coordinator import holds, machine_memory
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies.pace import Hold, Measurement, StepPace
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.held import simulate_held
from tests.support.simulation.mutations import Mutations

SEEDS = 60
FEW = 300  # seeds within which a planted mutation must be caught


def sweep(seeds: range) -> Coverage:
    """Coverage of all seeds; fails with the first that broke an invariant."""
    coverage, told = Coverage(), 0
    for seed in seeds:
        report, holds_told = simulate_held(seed, coverage)
        assert not report.failures, f"seed {seed} ({', '.join(report.faults)}): {report.failures[0]}"
        told += holds_told
    assert told > len(seeds)
    return coverage


def test_holds_are_told_with_their_end_and_are_no_part_of_a_step() -> None:
    sweep(range(SEEDS))


def test_a_seed_that_found_something_about_holds_stays_well() -> None:
    """A measurement that began with a hold was moved past its end, by a rounding error."""
    assert simulate_held(1570)[0].failures == ()


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_two_thousand_held_runs_keep_the_invariants() -> None:
    sweep(range(SEEDS, 2200))


def test_a_seed_of_a_held_run_is_the_same_each_time() -> None:
    assert simulate_held(7) == simulate_held(7)


# --- planted mutations -------------------------------------------------------------------------------

MUTATIONS = Mutations()


@MUTATIONS.plant
def a_hold_is_forgotten_with_its_generation(patch: pytest.MonkeyPatch) -> None:
    def forget(memory: MachineMemory, until: float) -> None:
        memory.hold = None

    patch.setattr(MachineMemory, "end_hold", forget)


@MUTATIONS.plant
def the_whole_hold_is_left_out_of_what_began_within_it(patch: pytest.MonkeyPatch) -> None:
    def left_out(hold: Hold, measured: Measurement, until: float) -> Measurement:
        moved_s = until - hold.since
        return holds.replace(measured, at=measured.at + moved_s)

    patch.setattr(Hold, "left_out", left_out)


@MUTATIONS.plant
def a_step_may_take_less_than_no_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPace, "step_s", lambda pace, step, now: (now - pace.at) / max(1, step - pace.step))


@MUTATIONS.plant
def only_the_next_step_ends_a_hold(patch: pytest.MonkeyPatch) -> None:
    real = MachineMemory.end_hold

    def late(memory: MachineMemory, until: float) -> None:
        if memory.hold is not None and memory.seen_step > memory.hold.step:
            real(memory, until)

    patch.setattr(machine_memory.MachineMemory, "end_hold", late)


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_a_planted_mistake_about_holds_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in range(FEW):
        try:
            failures = simulate_held(seed)[0].failures
        except (AssertionError, KeyError, IndexError, RuntimeError) as error:
            failures = (f"{type(error).__name__}: {error}",)
        if failures:
            return
    pytest.fail(f"{FEW} seeds did not notice: {name}")
