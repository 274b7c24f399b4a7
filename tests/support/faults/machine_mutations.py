"""Mutations of the coordinator's machine, planted in memory: what the simulator must notice.

``LISTED`` are those that a reader of the protocol once named, most of which survived then. ``OWN`` are more
of the kind: a guard left out, an order forgotten, a bound off by one. ``COMEBACK`` need a node that comes
back with its slots, ``TARGETS`` states that are damaged when a run goes back to them. Each is a row: what is
changed where.
``store_mutations`` has those of storage, and of what a run keeps for its next launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator import (
    checkpoint_tracker,
    drains,
    event_handlers,
    generation_stop,
    housekeeping,
    lineage,
    machine,
    recovery,
    resume_state,
    term_begin,
)
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.append_queue import AppendQueue
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker, PendingCheckpoint, SealedState
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies import failure, membership, restore_point, scale_up, store_home
from picotron_ray.coordinator.policies.membership import Roster
from picotron_ray.coordinator.policies.store_home import StoreHomes, StoreSearch
from picotron_ray.errors import CorruptError
from picotron_ray.failures import Remedy
from tests.support.faults.planting import Mutation, handler, nothing, put, wrap

FOR_EVER = 1e9


# --- what stands in for a function; ``real`` is the one that it stands in for ------------------------------


def _without(memory: MachineMemory, kind: type[Any]) -> None:
    memory.out[:] = [command for command in memory.out if not isinstance(command, kind)]


def _any_request_counts(real: Any, memory: MachineMemory, event: m.Inventory) -> None:
    real(memory, dataclasses.replace(event, request=memory.awaited.get(event.node, event.request)))


def _nobody_writes(real: Any, memory: MachineMemory) -> None:
    for worker in memory.roster.in_state("dying"):
        worker.writing = False
    real(memory)


def _forget_bad_manifests(real: Any, memory: MachineMemory, worker: str, name: str) -> None:
    real(memory, worker, name)
    memory.bad_manifests.clear()


def _forget_bad_slots(real: Any, memory: MachineMemory, event: m.Uploaded) -> None:
    before = set(memory.bad_slots)
    real(memory, event)
    memory.bad_slots.intersection_update(before)
    _without(memory, m.Quarantine)


def _interrupt_once(real: Any, memory: MachineMemory, mode: str) -> None:
    real(memory, mode)
    memory.remind_at = FOR_EVER


def _instead_of(remedy: Remedy) -> Callable[..., tuple[Remedy, str]]:
    """The breaker's answer with RETRY in the place of all but GIVE_UP, or SHRINK in the place of that."""

    def record(real: Any, self: Any, *words: Any) -> tuple[Remedy, str]:
        found, why = real(self, *words)
        return (remedy if (found is Remedy.GIVE_UP) == (remedy is Remedy.SHRINK) else found), why

    return record


def _lineage(off: int) -> Mutation:
    def on_lineage(newest: m.GenerationSpec | None, generation: m.GenerationId, step: int) -> bool:
        if newest is None or generation == newest.id:
            return lineage.on_lineage(newest, generation, step)
        return any(link.generation == generation and step <= link.through + off for link in newest.lineage)

    modules = (restore_point, recovery, resume_state, checkpoint_tracker)
    return put(on_lineage, *((module, "on_lineage") for module in modules))


def _all_slots(self: SealedState) -> tuple[m.SlotInfo, ...]:
    return tuple(slot for held in self.held.values() for slot in held)


def _count_all_as_whole(real: Any, self: SealedState, slots: Any) -> None:
    real(self, slots)
    self.whole.update(part.group for slot in slots for part in slot.fragments)


def _covered_where_counted(real: Any, self: SealedState) -> tuple[m.SlotInfo, ...] | None:
    return _all_slots(self) if len(self.whole) >= self.layout.state_groups else None


def _sealed_without_release(real: Any, self: CheckpointTracker, *words: Any) -> list[m.Command]:
    real(self, *words)
    return []


def _supersede_without_release(real: Any, self: CheckpointTracker, state: Any) -> list[m.Command]:
    for old in [key for key in self.seals if key < state]:
        self.seals.pop(old)
    return []


def _seals_of_members_alone(real: Any, memory: MachineMemory, event: m.SnapshotSealed) -> None:
    if event.node in memory.roster.nodes or event.node in memory.roster.silent:
        real(memory, event)


def _live_on(real: Any, memory: MachineMemory, event: m.Heartbeat) -> None:
    back = event.node not in memory.roster.nodes
    real(memory, event)
    if back:
        for worker in memory.roster.workers.on(event.node):
            del memory.roster.workers[worker.name]
        _without(memory, m.KillWorker)


def _only_known_are_ready(real: Any, memory: MachineMemory, event: m.WorkerReady) -> None:
    if event.worker in memory.roster.workers:
        real(memory, event)


def _only_known_are_heard(real: Any, memory: MachineMemory, event: m.Heartbeat) -> None:
    known = memory.roster.workers
    steps = {worker: step for worker, step in event.steps.items() if worker in known}
    others = tuple(worker for worker in event.others if worker in known)
    real(memory, dataclasses.replace(event, steps=steps, others=others))


def _missed_once_and_for_ever(real: Any, memory: MachineMemory, event: m.Heartbeat) -> None:
    missed = dict(memory.unseen)
    real(memory, event)
    memory.unseen |= missed


def _nobody_is_rescued(real: Any, memory: MachineMemory) -> None:
    rescued, memory.rescued = memory.rescued, {}
    real(memory)
    memory.rescued |= rescued


def _starts_never_take_long(real: Any, memory: MachineMemory) -> None:
    for worker in memory.roster.in_state("starting"):
        worker.since = memory.now
    real(memory)


def _no_hard_interrupt(real: Any, memory: MachineMemory, mode: str) -> None:
    real(memory, mode)
    if mode == "hard":
        _without(memory, m.Interrupt)


def _forget_the_stop(real: Any, memory: MachineMemory) -> None:
    memory.stop_requested = False
    real(memory)


def _hear_no_fence(real: Any, memory: MachineMemory, event: m.Appended) -> None:
    if not event.fenced:
        real(memory, event)


def _push_no_generation(real: Any, self: AppendQueue, entry: Any) -> None:
    if not isinstance(entry, m.AppendGeneration):
        real(self, entry)


def _begin_anew(real: Any, memory: MachineMemory, event: m.Begin) -> None:
    real(memory, dataclasses.replace(event, running=None))


def _drain_in_secret(real: Any, self: Roster, name: str) -> None:
    real(self, name)
    self.nodes[name].draining = False


def _tell_nobody(real: Any, memory: MachineMemory, worker: str, name: str) -> None:
    real(memory, worker, name)
    memory.bad_slots.clear()
    _without(memory, m.Quarantine)


def _trust_memory(real: Any, memory: MachineMemory, point: m.Source) -> bool:
    goes_on: bool = real(memory, point)
    memory.distrust_slots = False
    return goes_on


def _as_if_nothing_was_reached(real: Any, self: Any, kind: Any, reached: int, now: float) -> Any:
    return real(self, kind, self.step, now)


RECORD = (failure.Breaker, "record")

LISTED: dict[str, Mutation] = {
    "an_inventory_of_an_older_request_counts": handler(m.Inventory, _any_request_counts),
    "dying_writers_are_not_awaited": wrap(_nobody_writes, (machine.STEPS, machine.MachineState.COLLECTING)),
    "what_a_committed_pin_held_is_never_released": wrap(
        lambda real, self, state, nodes: real(self, state, ()), (CheckpointTracker, "settled")
    ),
    "what_a_void_pin_held_is_never_released": nothing(CheckpointTracker, "voided"),
    "a_lost_node_keeps_its_uploads_share": nothing(CheckpointTracker, "node_lost"),
    "a_lost_slot_keeps_its_uploads_share": nothing(CheckpointTracker, "slot_lost"),
    "bad_manifests_are_forgotten": wrap(_forget_bad_manifests, (event_handlers, "_quarantine")),
    "bad_slots_are_forgotten_after_an_upload": handler(m.Uploaded, _forget_bad_slots),
    "a_node_is_not_asked_again_when_it_comes_back": nothing(event_handlers, "ask_again"),
    "drain_notices_are_ignored": nothing(event_handlers.HANDLERS, m.DrainNotice),
    "no_move_follows_a_drain_notice": nothing(housekeeping, "reason_to_leave"),
    "the_coordinators_own_sleep_counts_against_others": put(FOR_EVER, (machine, "LONGEST_GAP_S")),
    "stalls_are_ignored": nothing(event_handlers.HANDLERS, m.Stalled),
    "reminders_are_not_sent": wrap(_interrupt_once, (generation_stop, "_interrupt")),
    "only_one_kill_is_tried": put(1, (generation_stop, "MOST_KILLS")),
    "the_breaker_never_resets": (
        *put(lambda self, step: False, (failure.Breaker, "progressed")),
        *wrap(_as_if_nothing_was_reached, RECORD),
    ),
    "the_breaker_never_gives_up": wrap(_instead_of(Remedy.SHRINK), RECORD),
    "the_breaker_always_says_retry": wrap(_instead_of(Remedy.RETRY), RECORD),
    "it_never_grows": put(lambda now, view: (False, "never"), (scale_up, "decide")),
    "it_grows_at_once": put(
        lambda now, view: (view.bigger_cost_s is not None, "at once"), (scale_up, "decide")
    ),
    "lineage_is_off_by_one": _lineage(1),
    "lineage_is_too_strict_by_one": _lineage(-1),
    "a_failed_upload_is_not_tried_again": wrap(
        lambda real, self, at, *nodes: real(self, FOR_EVER, *nodes), (PendingCheckpoint, "ask_at")
    ),
    "silence_is_noticed_ten_times_late": wrap(
        lambda real, self, now, timeout_s: real(self, now, 10 * timeout_s), (Roster, "silent_nodes")
    ),
    "an_append_whose_reply_is_lost_is_never_asked_for_again": wrap(
        lambda real, self, now: [] if self.in_flight else real(self, now), (AppendQueue, "pump")
    ),
}

OWN: dict[str, Mutation] = {
    "the_first_seal_of_a_node_counts_for_all": put(_all_slots, (SealedState, "covered")),
    "a_seal_that_comes_again_counts_twice": (
        *wrap(_count_all_as_whole, (SealedState, "_count")),
        *wrap(_covered_where_counted, (SealedState, "covered")),
    ),
    "late_seals_are_kept_pinned": wrap(_sealed_without_release, (CheckpointTracker, "sealed")),
    "what_is_superseded_stays_pinned": wrap(_supersede_without_release, (CheckpointTracker, "_supersede")),
    "uploads_are_asked_for_once": put(FOR_EVER, (machine, "REPLY_FACTOR")),
    "seals_of_a_node_that_was_lost_count": nothing(SealedState, "remove"),
    "a_commit_of_a_void_state_counts": put(lambda *words: True, (event_handlers, "counts")),
    "void_commits_are_still_written": nothing(CheckpointTracker, "rewound"),
    "commits_are_not_awaited_before_resuming": nothing(recovery, "_commit_would_help"),
    "nothing_is_decided_until_all_commits_are_in": put(FOR_EVER, (recovery, "COMMIT_PATIENCE_S")),
    "inventories_are_awaited_for_ever": put(FOR_EVER, (recovery, "MOST_ASKED")),
    "inventories_are_asked_for_once": put(1, (recovery, "MOST_ASKED")),
    "silent_nodes_are_not_taken_back": wrap(
        lambda real, self, name, *, silent: real(self, name, silent=False), (Roster, "lose")
    ),
    "workers_of_a_node_that_is_taken_back_live_on": handler(m.Heartbeat, _live_on),
    "unknown_workers_live_on": handler(m.WorkerReady, _only_known_are_ready),
    "who_counts_as_dead_and_lives_is_left_alone": handler(m.Heartbeat, _only_known_are_heard),
    "failed_starts_are_not_tried_again": put((FOR_EVER,), (membership, "START_BACKOFF_S")),
    "dead_workers_are_not_replaced": put(
        lambda memory: memory.job.cluster.max_workers - memory.deaths, (housekeeping, "wanted")
    ),
    "slow_starts_are_awaited_for_ever": wrap(_starts_never_take_long, (machine, "keep_house")),
    "the_stuck_are_killed_and_not_swept": nothing(housekeeping, "sweep_dying"),
    "nobody_is_interrupted_after_a_loss": wrap(_no_hard_interrupt, (generation_stop, "_interrupt")),
    "a_member_that_lags_behind_the_others_is_awaited_for_ever": put(
        FOR_EVER, (generation_stop, "SETTLE_FACTOR")
    ),
    "a_stop_is_forgotten_by_a_recovery": wrap(_forget_the_stop, (machine, "collect")),
    "the_fence_is_heard_and_work_goes_on": handler(m.Appended, _hear_no_fence),
    "an_agents_refusal_is_heard_and_work_goes_on": nothing(event_handlers.HANDLERS, m.Fenced),
    "what_a_silent_node_holds_is_forgotten": put(lambda self, node: {}, (CheckpointTracker, "pinned_on")),
    "the_log_entry_of_a_generation_is_left_out": wrap(_push_no_generation, (AppendQueue, "push")),
    "a_running_generation_is_never_adopted": handler(m.Begin, _begin_anew),
    "a_node_is_given_back_with_what_only_it_holds": put(lambda memory: True, (drains, "_settled")),
    "a_drained_node_gets_new_workers": wrap(_drain_in_secret, (Roster, "drain")),
    "resume_step_is_ignored": nothing(term_begin, "_plan_rewind"),
    "a_corrupt_slot_is_told_to_nobody": wrap(_tell_nobody, (event_handlers, "_quarantine")),
    "memory_is_never_distrusted": wrap(_trust_memory, (recovery, "_apply_remedy")),
    "suspects_are_not_replaced": nothing(recovery, "kill"),
    "a_launch_that_nobody_begins_is_awaited_for_ever": nothing(housekeeping, "watch_launch"),
    "a_launch_that_nobody_begins_may_not_leave": nothing(machine, "watch_launch"),
    "a_member_without_a_page_is_left_alone": nothing(housekeeping, "end_unseen"),
    "who_was_missed_once_is_missed_for_ever": wrap(
        _missed_once_and_for_ever, (event_handlers, "look_for_members")
    ),
    "rescues_are_not_noted": nothing(event_handlers, "note_rescues"),
    "who_is_rescued_is_swept": wrap(_nobody_is_rescued, (housekeeping, "sweep_dying")),
    "recovery_does_not_wait_for_a_rescue": wrap(
        _nobody_is_rescued, (machine.STEPS, machine.MachineState.COLLECTING)
    ),
    "a_store_is_always_asked_for_where_rank_0_is": put(
        lambda self, spec, silent: spec.members[0].node, (StoreHomes, "home")
    ),
    "stores_that_give_no_address_are_not_counted": nothing(StoreHomes, "failed"),
    "stores_that_froze_are_not_counted": nothing(StoreHomes, "answered"),
    "a_store_moves_the_third_time": put(2, (store_home, "MOST_FAILURES")),
    "a_silent_node_is_asked_for_its_store": wrap(
        lambda real, self, spec, silent: real(self, spec), (StoreHomes, "home")
    ),
    "a_store_is_awaited_for_a_minute": put(60.0, (store_home, "LEAST_ASKED_S")),
    "members_that_wait_for_a_store_are_not_told_that_there_is_none": put(
        lambda self, order: None, (StoreSearch, "given_up")
    ),
    "all_members_wait_for_the_store_of_a_frozen_agent": (
        *put(60.0, (store_home, "LEAST_ASKED_S")),
        *put(lambda self, order: None, (StoreSearch, "given_up")),
    ),
}


def _begin_anew_for_want(real: Any, memory: MachineMemory) -> Any:
    try:
        return real(memory)
    except CorruptError:
        return m.Source("init"), "nothing is left"


def _always_owed(job: Any, generations: Any) -> int | None:
    step: int | None = job.checkpoint.resume_step
    return step


THE_NEWEST_COUNTS = put(lambda memory: memory.spec, (resume_state, "_with_a_state"))
TARGETS: dict[str, Mutation] = {
    "a_launch_that_came_to_nothing_counts": THE_NEWEST_COUNTS,
    "a_run_whose_commits_are_void_begins_anew": (
        *THE_NEWEST_COUNTS,
        *wrap(_begin_anew_for_want, (recovery, "newest_state")),
    ),
    "a_rewind_that_came_to_nothing_is_forgotten": put(lambda memory: None, (recovery, "owed_rewind")),
    "each_launch_goes_back_again": put(_always_owed, (term_begin, "owed_step"), (resume_state, "owed_step")),
    "a_step_that_could_not_be_gone_back_to_was_obeyed": put(lambda *words: None, (resume_state, "owed_step")),
}

COMEBACK: dict[str, Mutation] = {
    "what_a_node_tells_before_it_joins_is_forgotten": handler(m.SnapshotSealed, _seals_of_members_alone),
}
