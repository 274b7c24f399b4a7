"""Mutations of storage and of kept slots: what the simulations with their real code must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.store import assembly, commit, deletion, gc
from picotron_ray.checkpoint.store.in_use import InUse
from picotron_ray.checkpoint.store.intents import Intents
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.coordinator import event_handlers, final_wait, machine
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker
from picotron_ray.runtime.node_agent import slot_release
from picotron_ray.runtime.node_agent.kept_state import KeptState
from picotron_ray.runtime.node_agent.term_file import TermFile
from picotron_ray.runtime.ray_cluster import kept_slots
from tests.support.faults.planting import Mutation, nothing, put, wrap
from tests.support.simulation import kept_world


def _once(real: Any, storage: Any, log: Any) -> float:
    if "asked" not in vars(log):
        vars(log)["asked"] = real(storage, log)
    return float(deletion.time.monotonic())


@contextmanager
def _knows_nothing(real: Any, self: InUse, keys: Any) -> Iterator[frozenset[str]]:
    with real(self, keys):
        yield frozenset()


STORED: dict[str, Mutation] = {
    "the_log_is_not_read_before_a_deletion": nothing(deletion, "_check_term"),
    "the_log_is_read_once_before_all_deletions": wrap(
        lambda real, *words: _once(real, *words), (deletion, "_still_newest")
    ),
    "what_the_log_said_counts_for_ever": put(1e9, (deletion, "KNOWN_S")),
    "a_save_that_has_listed_nothing_holds_nothing_up": put(lambda *words: [], (gc, "_began_before")),
    "a_collection_spares_nothing_that_a_commit_needs": wrap(
        lambda real, self, keys: nullcontext(keys), (InUse, "deletion")
    ),
    "a_commit_says_what_it_needs_after_its_look": wrap(
        lambda real, self, keys: nullcontext(frozenset()), (InUse, "needed")
    ),
    "a_commit_does_not_know_what_is_being_deleted": wrap(_knows_nothing, (InUse, "needed")),
    "what_a_save_lists_is_not_spared": wrap(
        lambda real, storage, log, intents, outlines: real(storage, log, [], outlines), (gc, "_marked")
    ),
    "a_rewind_finds_what_was_given_up": put(lambda job: 0, (gc, "rewind_reach")),
    "no_commit_is_retired": put(lambda *words: (), (gc, "_retire")),
    "one_commit_too_few_is_kept": wrap(
        lambda real, log, config, *words: real(log, config.model_copy(update={"keep_last": 1}), *words),
        (gc, "retained"),
    ),
    "one_damaged_commit_ends_collection": put(lambda *words: {}, (gc, "damaged_commits")),
    "one_damaged_commit_ends_later_ones": wrap(
        lambda real, manifest, entries, problem: _continued(real, manifest, entries, problem),
        (commit, "_continued"),
    ),
    "chunks_are_not_looked_for_before_a_commit": put(lambda *words: [], (assembly, "missing_chunks")),
    "a_save_looks_before_its_intent_is_put": wrap(
        lambda real, self, key, state, chunks: None if chunks is None else real(self, key, state, chunks),
        (Intents, "put"),
    ),
    "intents_are_renewed_after_their_commit": nothing(Intents, "settle"),
    "the_log_fences_nobody": nothing(RunLog, "_check_fence"),
    "the_end_of_a_run_does_not_ask_the_log": nothing(RunLog, "confirm"),
    "an_agent_obeys_any_term": put(lambda self, term: term, (TermFile, "newest")),
    "an_agents_next_process_knows_no_term": nothing(TermFile, "_write"),
}
"""Those of storage, for ``StoreSim``."""


def _continued(real: Any, manifest: Any, entries: Any, problem: Exception | None) -> Any:
    if problem is not None:
        raise problem
    return real(manifest, entries, problem)


def _release_all_kept(real: Any, folder: Path, state: Any, kept: Any, **named: Any) -> None:
    real(folder, state, kept, **named)
    older = {info.slot for info in kept if (info.generation.term, info.generation.n, info.step) <= state}
    if older and kept_slots.read_marker(folder) is not None:
        kept_slots.let_go(folder, older, older)


def _as_if_committed(real: Any, self: CheckpointTracker, node: str, state: Any) -> m.Release:
    release: m.Release = real(self, node, state)
    return dataclasses.replace(release, committed=release.step)


KEPT: dict[str, Mutation] = {
    "kept_steps_go_before_they_are_done_again": wrap(_release_all_kept, (kept_world, "release_slots")),
    "what_is_kept_goes_before_it_is_committed": wrap(_as_if_committed, (CheckpointTracker, "release")),
    "a_node_that_keeps_and_is_late_is_not_awaited": put(
        lambda memory, timed_out: False, (final_wait, "_awaits_keeper")
    ),
    "what_joining_nodes_keep_is_not_taken_up": put(
        lambda *words: None, (event_handlers, "take_up"), (final_wait, "take_up")
    ),
    "training_begins_before_what_was_kept_is_committed": put(
        lambda memory, timed_out: False, (machine, "step_kept")
    ),
    "slots_of_another_run_are_taken_for_ones_own": put(lambda marker, run: False, (kept_slots, "is_foreign")),
    "a_run_that_failed_keeps_nothing": wrap(
        lambda real, keep, finished: real(None, True), (kept_slots, "key_of")
    ),
    "what_was_marked_before_is_forgotten_at_the_end": put(None, (kept_slots, "MARKED_ALONE")),
    "what_an_agent_is_told_to_keep_it_does_not_mark": put(lambda self, key, run: False, (KeptState, "mark")),
    "a_launch_clears_what_is_kept": wrap(lambda real, folders: [], (kept_slots, "keeping")),
    "a_release_deletes_what_is_marked": put(lambda folder: None, (slot_release.kept_slots, "read_marker")),
}
"""Those of what a run keeps for its next launch, for ``KeptSim``."""
