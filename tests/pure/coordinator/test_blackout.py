"""Storage that goes down for good before the end of a run: no schedule loses what was trained."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from picotron_ray.coordinator import event_handlers, final_wait, machine_memory, term_begin
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.simulator.blackout import simulate_blackout

pytestmark = pytest.mark.timeout(400)  # seconds of work, but a busy machine may stretch them

SEEDS = max(1, int(os.environ.get("PICOTRON_SIMULATOR_SEEDS", "1000")) // 8)
FEW = 60  # seeds within which a planted mutation must be caught


def test_what_was_trained_is_committed_by_the_next_launch_for_every_seed() -> None:
    reports = [simulate_blackout(seed) for seed in range(SEEDS)]
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])
    struck = Counter(name for report in reports for name in set(report.faults))
    assert struck["crash"] > SEEDS / 5, "the run is often killed while it waits"
    assert min(struck[name] for name in ("restart", "noise", "outage")) >= 2, "the second launch is disturbed"


def test_a_seed_replays_to_the_last_event() -> None:
    assert [simulate_blackout(seed) for seed in range(5)] == [simulate_blackout(seed) for seed in range(5)]


def nothing_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        machine_memory, "Finish", lambda status, detail, keep, **more: m.Finish(status, detail, **more)
    )


def slots_are_not_marked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(final_wait, "KeepSlots", lambda *_: m.Alert("info", "nothing"))


def what_was_kept_is_not_taken_up(patch: pytest.MonkeyPatch) -> None:
    for module in (event_handlers, final_wait):
        patch.setattr(module, "take_up", lambda *_: None)


def a_restarted_coordinator_forgets_what_was_kept(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.begin
    handlers = event_handlers.HANDLERS

    def forgetful(memory: MachineMemory, event: Any) -> None:
        real(memory, m.Begin(event.term, event.commits, event.generations, event.running, event.workers))

    patch.setitem(handlers, m.Begin, forgetful)


def a_node_that_joins_releases_what_it_kept(patch: pytest.MonkeyPatch) -> None:
    newest = m.GenerationId(99, 1)
    for module in (event_handlers, term_begin):
        patch.setattr(
            module, "release_committed", lambda memory, node: memory.emit(m.Release(node, newest, 99, 99))
        )


def the_wait_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(final_wait, "out_of_patience", lambda *_: False)
    patch.setattr("picotron_ray.coordinator.recovery.out_of_patience", lambda *_: False)


def the_unlogged_generation_is_not_entered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(final_wait, "enter", lambda *_: None)


MUTATIONS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    nothing_is_kept, slots_are_not_marked, what_was_kept_is_not_taken_up,
    a_restarted_coordinator_forgets_what_was_kept, a_node_that_joins_releases_what_it_kept,
    the_wait_never_ends, the_unlogged_generation_is_not_entered,
)  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_a_planted_mutation_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    likely = {"a_restarted_coordinator_forgets_what_was_kept": (210, 231, 235)}.get(plant.__name__, ())
    assert any(simulate_blackout(seed).failures for seed in (*likely, *range(FEW)))
