"""Thousands of schedules of faults against the machine, and proof that the simulator would notice.

A failing seed is printed; ``simulate(seed)`` repeats it event for event.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from picotron_ray.coordinator import (
    append_queue,
    checkpoint_tracker,
    drains,
    event_handlers,
    generation_stop,
    machine,
    machine_memory,
    recovery,
    resume_state,
)
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies import membership, restore_point
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import Report, simulate, simulate_many
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.support.simulation.mutations import Mutations

pytestmark = pytest.mark.timeout(400)  # seconds of work, but a busy machine may stretch them

SEEDS = int(os.environ.get("PICOTRON_SIMULATOR_SEEDS", "1000"))
BAD_STEP_SEEDS = 120
FEW = 1000  # seeds within which a planted mutation must be caught
LIKELY = {"the_fence_is_ignored": 502}  # seeds that are tried first


@pytest.fixture(scope="module")
def swept() -> tuple[list[Report], Coverage]:
    """All seeds of the default run."""
    return sweep(range(SEEDS))


def sweep(seeds: range) -> tuple[list[Report], Coverage]:
    """Simulate seeds, spread over the cores.

    Their processes are not traced for coverage, which would double the time, but where a run records which
    test touches which line; the other tests here run the same lines in this process.
    """
    cores = min(4, os.cpu_count() or 1)
    shares = [seeds[first::cores] for first in range(cores)]
    reports: list[Report] = []
    coverage = Coverage()
    with pytest.MonkeyPatch.context() as patch:
        if "PICOTRON_TEST_CONTEXT" not in os.environ:
            patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
            patch.delenv("COVERAGE_PROCESS_START", raising=False)
        with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
            for found, seen in pool.map(simulate_many, shares):
                reports += found
                coverage.add(seen)
    return reports, coverage


def test_invariants_hold_for_every_seed(swept: tuple[list[Report], Coverage]) -> None:
    reports, _ = swept
    assert len(reports) == SEEDS
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])
    assert min(report.events for report in reports) >= 150
    assert min(len(report.faults) for report in reports) >= 3


@pytest.mark.parametrize("seed", [1858, 2002, 8574, 9120])
def test_seeds_that_found_something_stay_well(seed: int) -> None:
    """Of a generation that was seen at work nothing is left, and an older one's states come back."""
    assert simulate(seed).failures == ()


@pytest.mark.deep
@pytest.mark.timeout(3000)  # ten minutes on two cores of their own
def test_invariants_hold_for_ten_thousand_seeds() -> None:
    reports, coverage = sweep(range(SEEDS, 10_000))
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])
    print(coverage.table(list(FAULTS)))


def test_faults_reach_every_transition(
    swept: tuple[list[Report], Coverage], capsys: pytest.CaptureFixture[str]
) -> None:
    reports, coverage = swept
    with capsys.disabled():
        total = sum(report.events for report in reports)
        print(f"\n{len(reports)} seeds, {total} events, transition x fault (how often, by faults at work):")
        print(coverage.table(list(FAULTS)))
    rare = {
        (MachineState.NEW, MachineState.DONE),
        (MachineState.ABORTING, MachineState.DONE),
        (MachineState.LEAVING, MachineState.DONE),
        (MachineState.COLLECTING, MachineState.DONE),
    }
    unseen = {pair for pair in coverage.unseen() if MachineState.PAUSED not in pair}  # operated runs do
    assert unseen <= rare, "the end by fencing in a state that is soon over may be missed"
    for name in FAULTS:
        assert any(fault == name for _, fault in coverage.counts), f"fault {name} never struck"


def test_a_step_that_is_bad_for_all_ends_the_run_with_the_state_before_it_committed() -> None:
    """Whatever else goes wrong; a failure at the same time goes first, and the step is tried again."""
    reports = [simulate(seed, bad_step=41) for seed in range(BAD_STEP_SEEDS)]
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])


def test_a_seed_replays_to_the_last_event() -> None:
    seeds = range(20)
    once, seen = simulate_many(seeds)
    assert once == [simulate(seed) for seed in seeds]
    assert len({report.virtual_s for report in once}) == len(seeds)
    assert "running > aborting" in seen.table(list(FAULTS))


COMMANDS = """
import hashlib
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.simulator.run import simulate
digest, real = hashlib.sha256(), Machine.handle
def handle(self, event, now):
    commands = real(self, event, now)
    digest.update(repr(commands).encode())
    return commands
Machine.handle = handle
for seed in range(12):
    simulate(seed)
print(digest.hexdigest())
"""


def test_commands_do_not_depend_on_the_process_that_computes_them() -> None:
    """Sets of strings are ordered differently in every process; a log must replay in any."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    first, second = (process.communicate()[0] for process in started)
    assert len(first) == 65, "a digest and the end of the line"
    assert first == second


def test_seeds_are_counted_each_by_itself() -> None:
    apart = Coverage()
    for seed in (3, 4):
        _, seen = simulate_many([seed])
        apart.add(seen)
    _, together = simulate_many([3, 4])
    assert together.table(list(FAULTS)) == apart.table(list(FAULTS))


def test_the_generator_is_the_same_everywhere() -> None:
    rng = Rng(1)
    assert [rng.bits() for _ in range(2)] == [Rng(1).bits(), rng_second()]
    assert 0.0 <= min(Rng(seed).random() for seed in range(100)) < 0.1


def rng_second() -> int:
    rng = Rng(1)
    rng.bits()
    return rng.bits()


# --- planted mutations -------------------------------------------------------------------------------

MUTATIONS = Mutations()


@MUTATIONS.plant
def a_state_with_parts_missing_counts_as_complete(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore_point, "cover", lambda slots, layout: tuple(slots))


@MUTATIONS.plant
def void_states_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore_point, "on_lineage", lambda *args: True)


@MUTATIONS.plant
def the_oldest_state_is_taken(patch: pytest.MonkeyPatch) -> None:
    real = restore_point.newest_slots

    def oldest(slots: Any, layouts: Any, newest: Any) -> Any:
        slots = list(slots)
        found = [
            real([s for s in slots if s.step == step], layouts, newest) for step in {s.step for s in slots}
        ]
        return min((source for source in found if source), key=lambda source: source.step, default=None)

    patch.setattr(restore_point, "newest_slots", oldest)


@MUTATIONS.plant
def commits_are_preferred_to_memory(patch: pytest.MonkeyPatch) -> None:
    real = resume_state.restore_point
    patch.setattr(resume_state, "restore_point", lambda *a, **k: real(*a, **{**k, "use_slots": False}))


@MUTATIONS.plant
def lineage_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resume_state, "descend", lambda parent, source: ())


@MUTATIONS.plant
def commits_overtake_their_generations(patch: pytest.MonkeyPatch) -> None:
    real = append_queue.AppendQueue.push

    def push(self: append_queue.AppendQueue, entry: append_queue.PendingAppend) -> None:
        real(self, entry)
        if isinstance(entry, m.AppendCommit):
            self.entries.rotate(1)
            self.in_flight, self.due = False, 0.0

    patch.setattr(append_queue.AppendQueue, "push", push)


@MUTATIONS.plant
def one_nodes_upload_makes_a_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_tracker.PendingCheckpoint, "uploaded", property(lambda self: bool(self.done)))


@MUTATIONS.plant
def outcomes_of_older_generations_count(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.outcome

    def outcome(memory: machine_memory.MachineMemory, event: m.Outcome) -> None:
        real(memory, dataclasses.replace(event, generation=memory.spec.id) if memory.spec else event)

    patch.setitem(event_handlers.HANDLERS, m.Outcome, outcome)


@MUTATIONS.plant
def the_fence_is_ignored(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.appended

    def appended(memory: machine_memory.MachineMemory, event: m.Appended) -> None:
        real(memory, dataclasses.replace(event, fenced=False, error="refused") if event.fenced else event)

    patch.setitem(event_handlers.HANDLERS, m.Appended, appended)


@MUTATIONS.plant
def only_one_node_is_asked(patch: pytest.MonkeyPatch) -> None:
    real = recovery.collect

    def collect(memory: machine_memory.MachineMemory) -> None:
        real(memory)
        memory.awaited = dict(list(memory.awaited.items())[:1])

    patch.setattr(machine, "collect", collect)


@MUTATIONS.plant
def a_drained_node_goes_with_the_only_copy(patch: pytest.MonkeyPatch) -> None:
    at_rest = (MachineState.RUNNING, MachineState.WAITING)
    patch.setattr(drains, "_settled", lambda memory: memory.state in at_rest)


@MUTATIONS.plant
def the_stuck_are_never_killed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generation_stop, "kill", lambda memory, name, reason: None)


@MUTATIONS.plant
def the_dead_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    def unsettled(self: machine_memory.MachineMemory) -> list[m.Member]:
        members = () if self.spec is None else self.spec.members
        return [member for member in members if member.worker not in self.outcomes]

    patch.setattr(machine_memory.MachineMemory, "unsettled", unsettled)


@MUTATIONS.plant
def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership.Roster, "silent_nodes", lambda self, now, timeout_s: [])


@MUTATIONS.plant
def corrupt_slots_are_offered_again(patch: pytest.MonkeyPatch) -> None:
    def forget(memory: machine_memory.MachineMemory, worker: str, name: str) -> None:
        generation_stop.blame(memory, FailureKind.CORRUPT, worker, culprit=True, text=f"{name} is corrupt")

    patch.setattr(event_handlers, "_quarantine", forget)


@MUTATIONS.plant
def generation_numbers_are_used_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "GenerationId", lambda term, n: m.GenerationId(term, 1))


@MUTATIONS.plant
def the_end_does_not_wait_for_the_last_commit(patch: pytest.MonkeyPatch) -> None:
    def finalising(memory: machine_memory.MachineMemory) -> None:
        assert memory.final is not None
        memory.finish(*memory.final)  # type: ignore[arg-type]

    patch.setitem(dict_of_steps(), MachineState.FINALISING, finalising)


@MUTATIONS.plant
def void_snapshots_are_released_while_others_restore(patch: pytest.MonkeyPatch) -> None:
    real = recovery._launch

    def launch(memory: machine_memory.MachineMemory, *arguments: Any) -> None:
        real(memory, *arguments)
        memory.emit(*memory.checkpoints.release_void())

    patch.setattr(recovery, "_launch", launch)


@MUTATIONS.plant
def a_boundary_is_left_before_all_have_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "step_leaving", lambda memory: bool(memory.outcomes))


@MUTATIONS.plant
def workers_of_a_restart_are_taken_for_idle(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.begin

    def begin(memory: machine_memory.MachineMemory, event: m.Begin) -> None:
        real(memory, dataclasses.replace(event, running=None, busy=()))

    patch.setitem(event_handlers.HANDLERS, m.Begin, begin)


def dict_of_steps() -> dict[MachineState, Any]:
    assert isinstance(machine.STEPS, dict)
    return machine.STEPS


def test_enough_mutations_are_planted() -> None:
    assert len(MUTATIONS) >= 10


@pytest.mark.deep
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in (LIKELY.get(name, 0), *range(FEW)):
        try:
            failures = simulate(seed).failures
        except (AssertionError, KeyError, IndexError, RuntimeError) as error:
            failures = (f"{type(error).__name__}: {error}",)
        if failures:
            return
    pytest.fail(f"{FEW} seeds did not notice: {name}")
