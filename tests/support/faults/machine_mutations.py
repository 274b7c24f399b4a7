"""Mutations of the coordinator's machine, planted in memory: what the simulator must notice.

``LISTED`` are those that a reader of the protocol once named, most of which survived then. ``OWN`` are more
of the kind: a guard left out, an order forgotten, a bound off by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from picotron_ray.coordinator import (
    checkpoint_tracker,
    drains,
    event_handlers,
    final_wait,
    generation_stop,
    housekeeping,
    lineage,
    machine,
    recovery,
)
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.append_queue import AppendQueue
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker, PendingCheckpoint
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies import failure, membership, restore_point, scale_up
from picotron_ray.coordinator.policies.membership import Roster
from picotron_ray.failures import Remedy

Plant = Callable[[pytest.MonkeyPatch], None]
LISTED: dict[str, Plant] = {}
OWN: dict[str, Plant] = {}


def listed(plant: Plant) -> Plant:
    LISTED[plant.__name__] = plant
    return plant


def own(plant: Plant) -> Plant:
    OWN[plant.__name__] = plant
    return plant


def _handler(
    patch: pytest.MonkeyPatch, kind: type[Any], handler: Callable[[MachineMemory, Any], None]
) -> None:
    patch.setitem(event_handlers.HANDLERS, kind, handler)  # type: ignore[arg-type]


# --- listed --------------------------------------------------------------------------------------------


@listed
def an_inventory_of_an_older_request_counts(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.inventory

    def inventory(memory: MachineMemory, event: m.Inventory) -> None:
        real(memory, dataclasses.replace(event, request=memory.awaited.get(event.node, event.request)))

    _handler(patch, m.Inventory, inventory)


@listed
def dying_writers_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    real = recovery.step_collecting

    def collecting(memory: MachineMemory) -> None:
        for worker in memory.roster.in_state("dying"):
            worker.writing = False
        real(memory)

    patch.setitem(machine.STEPS, machine.MachineState.COLLECTING, collecting)  # type: ignore[arg-type]


@listed
def what_a_committed_pin_held_is_never_released(patch: pytest.MonkeyPatch) -> None:
    real = CheckpointTracker.settled
    patch.setattr(CheckpointTracker, "settled", lambda self, state, nodes: real(self, state, ()))


@listed
def what_a_void_pin_held_is_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointTracker, "voided", lambda self, node, state: None)


@listed
def a_lost_node_keeps_its_uploads_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointTracker, "node_lost", lambda self, node: None)


@listed
def a_lost_slot_keeps_its_uploads_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointTracker, "slot_lost", lambda self, node, slot, state: None)


@listed
def bad_manifests_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers._quarantine

    def forget(memory: MachineMemory, worker: str, name: str) -> None:
        real(memory, worker, name)
        memory.bad_manifests.clear()

    patch.setattr(event_handlers, "_quarantine", forget)


@listed
def bad_slots_are_forgotten_after_an_upload(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.uploaded

    def uploaded(memory: MachineMemory, event: m.Uploaded) -> None:
        before = set(memory.bad_slots)
        real(memory, event)
        memory.bad_slots.intersection_update(before)
        memory.out[:] = [command for command in memory.out if not isinstance(command, m.Quarantine)]

    _handler(patch, m.Uploaded, uploaded)


@listed
def a_node_is_not_asked_again_when_it_comes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(event_handlers, "ask_again", lambda memory, node: None)


@listed
def drain_notices_are_ignored(patch: pytest.MonkeyPatch) -> None:
    _handler(patch, m.DrainNotice, lambda memory, event: None)


@listed
def no_move_follows_a_drain_notice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(housekeeping, "reason_to_leave", lambda memory, to_start: None)


@listed
def the_coordinators_own_sleep_counts_against_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "LONGEST_GAP_S", 1e9)


@listed
def stalls_are_ignored(patch: pytest.MonkeyPatch) -> None:
    _handler(patch, m.Stalled, lambda memory, event: None)


@listed
def reminders_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    real = generation_stop._interrupt

    def once(memory: MachineMemory, mode: str) -> None:
        real(memory, mode)
        memory.remind_at = 1e12

    patch.setattr(generation_stop, "_interrupt", once)


@listed
def only_one_kill_is_tried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generation_stop, "MOST_KILLS", 1)


@listed
def the_breaker_never_resets(patch: pytest.MonkeyPatch) -> None:
    real = failure.Breaker.record

    def record(self: failure.Breaker, kind: Any, reached: int, now: float) -> tuple[Remedy, str]:
        return real(self, kind, self.step, now)

    patch.setattr(failure.Breaker, "progressed", lambda self, step: False)
    patch.setattr(failure.Breaker, "record", record)


@listed
def the_breaker_never_gives_up(patch: pytest.MonkeyPatch) -> None:
    real = failure.Breaker.record

    def record(self: failure.Breaker, kind: Any, reached: int, now: float) -> tuple[Remedy, str]:
        remedy, why = real(self, kind, reached, now)
        return (Remedy.SHRINK if remedy is Remedy.GIVE_UP else remedy), why

    patch.setattr(failure.Breaker, "record", record)


@listed
def the_breaker_always_says_retry(patch: pytest.MonkeyPatch) -> None:
    real = failure.Breaker.record

    def record(self: failure.Breaker, kind: Any, reached: int, now: float) -> tuple[Remedy, str]:
        remedy, why = real(self, kind, reached, now)
        return (remedy if remedy is Remedy.GIVE_UP else Remedy.RETRY), why

    patch.setattr(failure.Breaker, "record", record)


@listed
def it_never_grows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scale_up, "decide", lambda now, view: (False, "never"))


@listed
def it_grows_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scale_up, "decide", lambda now, view: (view.bigger_cost_s is not None, "at once"))


def _lineage(patch: pytest.MonkeyPatch, off: int) -> None:
    def on_lineage(newest: m.GenerationSpec | None, generation: m.GenerationId, step: int) -> bool:
        if newest is None or generation == newest.id:
            return lineage.on_lineage(newest, generation, step)
        return any(link.generation == generation and step <= link.through + off for link in newest.lineage)

    for module in (restore_point, recovery, event_handlers, checkpoint_tracker, final_wait):
        patch.setattr(module, "on_lineage", on_lineage)


@listed
def lineage_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    _lineage(patch, 1)


@listed
def lineage_is_too_strict_by_one(patch: pytest.MonkeyPatch) -> None:
    _lineage(patch, -1)


@listed
def a_failed_upload_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    real = PendingCheckpoint.ask_at
    patch.setattr(PendingCheckpoint, "ask_at", lambda self, at, *nodes: real(self, 1e12, *nodes))


@listed
def silence_is_noticed_ten_times_late(patch: pytest.MonkeyPatch) -> None:
    real = Roster.silent_nodes
    patch.setattr(Roster, "silent_nodes", lambda self, now, timeout_s: real(self, now, 10 * timeout_s))


@listed
def an_append_whose_reply_is_lost_is_never_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    real = AppendQueue.pump
    patch.setattr(AppendQueue, "pump", lambda self, now: [] if self.in_flight else real(self, now))


# --- own -----------------------------------------------------------------------------------------------


@own
def the_first_seal_of_a_node_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    def covered(self: checkpoint_tracker.SealedState) -> tuple[m.SlotInfo, ...] | None:
        return tuple(slot for held in self.held.values() for slot in held)

    patch.setattr(checkpoint_tracker.SealedState, "covered", covered)


@own
def a_seal_that_comes_again_counts_twice(patch: pytest.MonkeyPatch) -> None:
    real = checkpoint_tracker.SealedState._count

    def count(self: checkpoint_tracker.SealedState, slots: Any) -> None:
        real(self, slots)
        self.whole.update(part.group for slot in slots for part in slot.fragments)

    patch.setattr(checkpoint_tracker.SealedState, "_count", count)
    patch.setattr(
        checkpoint_tracker.SealedState,
        "covered",
        lambda self: (
            tuple(slot for held in self.held.values() for slot in held)
            if len(self.whole) >= self.layout.state_groups
            else None
        ),
    )


@own
def late_seals_are_kept_pinned(patch: pytest.MonkeyPatch) -> None:
    real = CheckpointTracker.sealed

    def sealed(self: CheckpointTracker, *arguments: Any) -> list[m.Command]:
        real(self, *arguments)
        return []

    patch.setattr(CheckpointTracker, "sealed", sealed)


@own
def what_is_superseded_stays_pinned(patch: pytest.MonkeyPatch) -> None:
    def supersede(self: CheckpointTracker, state: Any) -> list[m.Command]:
        for old in [key for key in self.seals if key < state]:
            self.seals.pop(old)
        return []

    patch.setattr(CheckpointTracker, "_supersede", supersede)


@own
def uploads_are_asked_for_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "REPLY_FACTOR", 1e9)


@own
def seals_of_a_node_that_was_lost_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_tracker.SealedState, "remove", lambda self, node: None)


@own
def a_commit_of_a_void_state_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(event_handlers, "on_lineage", lambda *arguments: True)


@own
def void_commits_are_still_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointTracker, "rewound", lambda self, newest: None)


@own
def commits_are_not_awaited_before_resuming(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_commit_would_help", lambda memory, point: False)


@own
def nothing_is_decided_until_all_commits_are_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "COMMIT_PATIENCE_S", 1e9)


@own
def inventories_are_awaited_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "MOST_ASKED", 10**9)


@own
def inventories_are_asked_for_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "MOST_ASKED", 1)


@own
def silent_nodes_are_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    real = Roster.lose
    patch.setattr(Roster, "lose", lambda self, name, *, silent: real(self, name, silent=False))


@own
def workers_of_a_node_that_is_taken_back_live_on(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.heartbeat

    def heartbeat(memory: MachineMemory, event: m.Heartbeat) -> None:
        back = event.node not in memory.roster.nodes
        real(memory, event)
        if back:
            for worker in memory.roster.workers.on(event.node):
                del memory.roster.workers[worker.name]
            memory.out[:] = [c for c in memory.out if not isinstance(c, m.KillWorker)]

    _handler(patch, m.Heartbeat, heartbeat)


@own
def unknown_workers_live_on(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.worker_ready

    def ready(memory: MachineMemory, event: m.WorkerReady) -> None:
        if event.worker in memory.roster.workers:
            real(memory, event)

    _handler(patch, m.WorkerReady, ready)


@own
def who_counts_as_dead_and_lives_is_left_alone(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.heartbeat

    def heartbeat(memory: MachineMemory, event: m.Heartbeat) -> None:
        known = memory.roster.workers
        steps = {worker: step for worker, step in event.steps.items() if worker in known}
        others = tuple(worker for worker in event.others if worker in known)
        real(memory, dataclasses.replace(event, steps=steps, others=others))

    _handler(patch, m.Heartbeat, heartbeat)


@own
def failed_starts_are_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "START_BACKOFF_S", (1e9,))


@own
def dead_workers_are_not_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(housekeeping, "wanted", lambda memory: memory.job.cluster.max_workers - memory.deaths)


@own
def slow_starts_are_awaited_for_ever(patch: pytest.MonkeyPatch) -> None:
    real = housekeeping.keep_house

    def keep(memory: MachineMemory) -> None:
        for worker in memory.roster.in_state("starting"):
            worker.since = memory.now
        real(memory)

    patch.setattr(machine, "keep_house", keep)


@own
def the_stuck_are_killed_and_not_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(housekeeping, "sweep_dying", lambda memory: None)


@own
def nobody_is_interrupted_after_a_loss(patch: pytest.MonkeyPatch) -> None:
    real = generation_stop._interrupt

    def interrupt(memory: MachineMemory, mode: str) -> None:
        real(memory, mode)
        if mode == "hard":
            memory.out[:] = [c for c in memory.out if not isinstance(c, m.Interrupt)]

    patch.setattr(generation_stop, "_interrupt", interrupt)


@own
def a_member_that_lags_behind_the_others_is_awaited_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generation_stop, "SETTLE_FACTOR", 1e9)


@own
def a_stop_is_forgotten_by_a_recovery(patch: pytest.MonkeyPatch) -> None:
    real = recovery.collect

    def collect(memory: MachineMemory) -> None:
        memory.stop_requested = False
        real(memory)

    patch.setattr(machine, "collect", collect)


@own
def the_fence_is_heard_and_work_goes_on(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.appended

    def appended(memory: MachineMemory, event: m.Appended) -> None:
        if not event.fenced:
            real(memory, event)

    _handler(patch, m.Appended, appended)


@own
def an_agents_refusal_is_heard_and_work_goes_on(patch: pytest.MonkeyPatch) -> None:
    _handler(patch, m.Fenced, lambda memory, event: None)


@own
def what_a_silent_node_holds_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointTracker, "pinned_on", lambda self, node: {})


@own
def the_log_entry_of_a_generation_is_left_out(patch: pytest.MonkeyPatch) -> None:
    real = AppendQueue.push
    patch.setattr(
        AppendQueue,
        "push",
        lambda self, entry: None if isinstance(entry, m.AppendGeneration) else real(self, entry),
    )


@own
def a_running_generation_is_never_adopted(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers.begin
    _handler(patch, m.Begin, lambda memory, event: real(memory, dataclasses.replace(event, running=None)))


@own
def a_node_is_given_back_with_what_only_it_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drains, "_settled", lambda memory: True)


@own
def a_drained_node_gets_new_workers(patch: pytest.MonkeyPatch) -> None:
    real = Roster.drain

    def drain(self: Roster, name: str) -> None:
        real(self, name)
        self.nodes[name].draining = False

    patch.setattr(Roster, "drain", drain)


@own
def resume_step_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(event_handlers, "_plan_rewind", lambda memory, event: None)


@own
def a_corrupt_slot_is_told_to_nobody(patch: pytest.MonkeyPatch) -> None:
    real = event_handlers._quarantine

    def quiet(memory: MachineMemory, worker: str, name: str) -> None:
        real(memory, worker, name)
        memory.bad_slots.clear()
        memory.out[:] = [c for c in memory.out if not isinstance(c, m.Quarantine)]

    patch.setattr(event_handlers, "_quarantine", quiet)


@own
def memory_is_never_distrusted(patch: pytest.MonkeyPatch) -> None:
    real = recovery._apply_remedy

    def apply(memory: MachineMemory, point: m.Source) -> bool:
        goes_on = real(memory, point)
        memory.distrust_slots = False
        return goes_on

    patch.setattr(recovery, "_apply_remedy", apply)


@own
def suspects_are_not_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "kill", lambda memory, name, reason: None)


ALL = {**LISTED, **OWN}
RAISED = (AssertionError, KeyError, IndexError, RuntimeError)  # by a machine that is broken
