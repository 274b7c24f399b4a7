"""The tracker of checkpoints: what it holds after each thing that can happen, compared whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker, PendingCheckpoint, known_layouts
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import gid, of, snapshot, spec

ONE = spec(1, m.Source("init"), None, Layout(tp=2))  # w0 on n0 and w1 on n1: each holds one half


def seal(tracker: CheckpointTracker, *steps: int, nodes: tuple[str, ...] = ("n0", "n1")) -> None:
    for step in steps:
        for node in nodes:
            slots = tuple(slot for slot in snapshot(ONE, step) if slot.node == node)
            assert tracker.sealed((step, ONE.id), node, slots, ONE.layout) == []


@pytest.fixture
def tracker() -> CheckpointTracker:
    return CheckpointTracker(10.0)


def release(node: str, step: int, committed: int = 0) -> m.Release:
    return m.Release(node, ONE.id, step, committed)


def upload(node: str, step: int) -> m.Upload:
    return m.Upload(node, ONE.id, step, (f"w{node[1]}.{step}",))


def test_uploads_are_asked_for_again_when_their_reply_is_due(tracker: CheckpointTracker) -> None:
    assert (tracker.plan(0.0), tracker.wake_at) == ([], None)
    seal(tracker, 5)
    assert tracker.plan(1.0) == [upload("n0", 5), upload("n1", 5)]
    assert (tracker.plan(10.9), tracker.wake_at) == ([], 11.0)
    assert not tracker.uploaded(m.Uploaded("n0", ONE.id, 5), 10.9)
    assert tracker.plan(11.0) == [upload("n1", 5)]
    for now, due in ((12.0, 12.5), (13.0, 14.0), (15.0, 17.0)):
        assert not tracker.uploaded(m.Uploaded("n1", ONE.id, 5, "down"), now)
        assert tracker.wake_at == due
    assert (tracker.plan(16.9), tracker.plan(17.0)) == ([], [upload("n1", 5)])
    assert not tracker.uploaded(m.Uploaded("n2", ONE.id, 5), 18.0), "a node that has no part"
    assert not tracker.uploaded(m.Uploaded("n1", ONE.id, 6), 18.0)
    assert not tracker.uploaded(m.Uploaded("n1", gid(2), 5), 18.0)
    assert tracker.uploaded(m.Uploaded("n1", ONE.id, 5), 18.0)
    assert not tracker.uploaded(m.Uploaded("n1", ONE.id, 5), 18.0), "told twice"
    assert (tracker.plan(99.0), tracker.wake_at) == ([], None)


def test_an_earlier_upload_of_other_slots_of_the_state_does_not_end_the_newest(
    tracker: CheckpointTracker,
) -> None:
    """A part of what is asked for would be committed, and refused again and again."""
    whole = Layout(dp=2, pp=2)
    a0, b1, b2 = (
        m.SlotInfo(node, slot, ONE.id, 5, rank, (m.Fragment(group),))
        for node, slot, rank, group in (("a", "a0", 0, 0), ("b", "b1", 1, 1), ("b", "b2", 2, 0))
    )
    tracker.sealed((5, ONE.id), "a", (a0,), whole)
    tracker.sealed((5, ONE.id), "b", (b1, b2), whole)
    assert tracker.plan(0.0) == [m.Upload("a", ONE.id, 5, ("a0",)), m.Upload("b", ONE.id, 5, ("b1",))]
    tracker.node_lost("a")
    (both,) = tracker.plan(1.0)
    assert isinstance(both, m.Upload)
    assert sorted(both.slots) == ["b1", "b2"]
    assert not tracker.uploaded(m.Uploaded("b", ONE.id, 5, "", ("b1",)), 2.0)
    assert not tracker.uploaded(m.Uploaded("b", ONE.id, 5, "down", ("b1",)), 2.0)
    assert (tracker.pending and tracker.pending.errors) == 0, "it is no failure of the newest either"
    assert tracker.uploaded(m.Uploaded("b", ONE.id, 5, "", both.slots), 3.0)


def test_what_is_settled_is_forgotten_with_all_before_it(tracker: CheckpointTracker) -> None:
    seal(tracker, 5, 6)
    tracker.plan(0.0)
    seal(tracker, 7)
    tracker.committed = 4
    assert tracker.settled((6, ONE.id), ["n0", "n2"]) == [release("n0", 6, 4), release("n2", 6, 4)]
    assert tracker.pending is None
    assert list(tracker.seals) == [(7, ONE.id)]
    assert tracker.released == (6, ONE.id)
    assert tracker.settled((5, ONE.id), []) == []
    assert tracker.released == (6, ONE.id), "an older one changes nothing"
    late = tracker.sealed((6, ONE.id), "n1", (), ONE.layout)
    assert late == [release("n1", 6, 4)]
    tracker.plan(1.0)
    tracker.settled((6, ONE.id), [])
    assert tracker.pending is not None, "7 is under way"


def test_of_several_whole_states_the_newest_is_uploaded_and_the_older_are_freed(
    tracker: CheckpointTracker,
) -> None:
    seal(tracker, 5, 6)
    seal(tracker, 7, nodes=("n1",))
    freed = [release("n0", 5), release("n1", 5)]
    assert tracker.plan(0.0) == [*freed, upload("n0", 6), upload("n1", 6)]
    assert list(tracker.seals) == [(6, ONE.id), (7, ONE.id)]
    tracker.uploaded(m.Uploaded("n0", ONE.id, 6, "down"), 1.0)
    assert tracker.plan(1.2) == [], "there is nothing better than the one that fails"
    late = tracker.sealed((4, ONE.id), "n0", (snapshot(ONE, 4)[0],), ONE.layout)
    assert late == [release("n0", 5)], "told late, it would stay pinned until the next commit"
    assert list(tracker.seals) == [(6, ONE.id), (7, ONE.id)]
    seal(tracker, 7, nodes=("n0",))
    assert [command.step for command in of(tracker.plan(1.3), m.Upload)] == [7, 7]


def test_a_checkpoint_that_is_uploaded_is_not_replaced(tracker: CheckpointTracker) -> None:
    seal(tracker, 5)
    tracker.plan(0.0)
    tracker.uploaded(m.Uploaded("n0", ONE.id, 5, "down"), 0.0)
    for node in ("n0", "n1"):
        tracker.uploaded(m.Uploaded(node, ONE.id, 5), 1.0)
    seal(tracker, 6)
    assert tracker.plan(2.0) == []
    assert tracker.commit() == m.AppendCommit(ONE.id, 5, ("n0", "n1"))


def test_lines_of_the_ledger_that_no_part_had_are_asked_of_all_who_hold_the_state_and_then_left_out(
    tracker: CheckpointTracker,
) -> None:
    replicas = Layout(dp=2)  # each node holds all of the state
    two = spec(1, m.Source("init"), None, replicas)
    for slot in snapshot(two, 5):
        assert tracker.sealed((5, ONE.id), slot.node, (slot,), replicas) == []
    (first,) = of(tracker.plan(0.0), m.Upload)
    assert tracker.uploaded(m.Uploaded(first.node, ONE.id, 5), 1.0)
    assert not tracker.commit().unproven
    assert tracker.parts_gone((5, ONE.id), 2.0, ledger=True)
    asked = of(tracker.plan(2.5), m.Upload)
    assert {command.node for command in asked} == {"n0", "n1"}
    assert not tracker.uploaded(m.Uploaded("n0", ONE.id, 5), 3.0)
    assert tracker.uploaded(m.Uploaded("n1", ONE.id, 5), 3.0)
    assert tracker.commit() == m.AppendCommit(ONE.id, 5, ("n0", "n1"), unproven=True)


def test_a_newer_checkpoint_does_not_begin_to_ask_for_lost_lines_anew(tracker: CheckpointTracker) -> None:
    """Where checkpoints come faster than they are uploaded twice, none would ever be committed."""
    seal(tracker, 5)
    tracker.plan(0.0)
    assert tracker.parts_gone((5, ONE.id), 0.0, ledger=True)
    seal(tracker, 6)
    assert [command.step for command in of(tracker.plan(1.0), m.Upload)] == [6, 6]
    assert tracker.commit().unproven
    tracker.settled((6, ONE.id), ())
    seal(tracker, 7)
    tracker.plan(2.0)
    assert not tracker.commit().unproven


def test_starting_what_is_under_way_changes_nothing(tracker: CheckpointTracker) -> None:
    tracker.start((5, ONE.id), snapshot(ONE, 5))
    tracker.plan(0.0)
    begun = tracker.pending
    tracker.start((5, ONE.id), snapshot(ONE, 5))
    assert tracker.pending is begun
    tracker.start((6, ONE.id), snapshot(ONE, 6))
    fresh = {"n0": ("w0.6",), "n1": ("w1.6",)}
    assert tracker.pending == PendingCheckpoint((6, ONE.id), fresh, due={"n0": 0.0, "n1": 0.0})


def test_a_lost_slot_is_taken_from_its_own_node_and_state_alone(tracker: CheckpointTracker) -> None:
    seal(tracker, 5, 6)
    before = {key: dict(sealed.held) for key, sealed in tracker.seals.items()}
    tracker.slot_lost("n9", "w0.5", (5, ONE.id))
    tracker.slot_lost("n0", "w1.5", (5, ONE.id))
    tracker.slot_lost("n0", "w0.5", (6, ONE.id))  # names of files are reused
    assert {key: sealed.held for key, sealed in tracker.seals.items()} == before
    tracker.slot_lost("n0", "w0.5", (5, ONE.id))
    before[5, ONE.id]["n0"] = ()
    assert {key: sealed.held for key, sealed in tracker.seals.items()} == before
    tracker.plan(0.0)
    tracker.slot_lost("n0", "w1.6", (6, ONE.id))
    tracker.slot_lost("n9", "w0.6", (6, ONE.id))
    tracker.slot_lost("n0", "w0.6", (5, ONE.id))
    assert tracker.pending is not None, "it does not need these"
    tracker.slot_lost("n0", "w0.6", (6, ONE.id))
    assert tracker.pending is None


def test_a_lost_node_takes_what_it_has_not_uploaded(tracker: CheckpointTracker) -> None:
    seal(tracker, 5, 6)
    tracker.plan(0.0)
    tracker.uploaded(m.Uploaded("n0", ONE.id, 6), 0.0)
    tracker.node_lost("n0")
    tracker.node_lost("n9")
    assert tracker.pending is not None
    assert [list(sealed.held) for sealed in tracker.seals.values()] == [["n1"]]
    tracker.node_lost("n1")
    assert tracker.pending is None
    tracker.node_lost("n1")


def test_a_rewind_keeps_what_is_on_the_lineage(tracker: CheckpointTracker) -> None:
    seal(tracker, 10, 20, nodes=("n0",))
    two = spec(2, m.Source("commit", 10, ONE.id, manifest="m10"), ONE)
    for state, kept in (((10, ONE.id), True), ((11, ONE.id), False), (None, False)):
        tracker.released = state
        tracker.start(state or (12, ONE.id), snapshot(ONE, 10))
        tracker.rewound(two)
        assert (tracker.released == state, tracker.pending is not None) == (kept or state is None, kept)
    assert list(tracker.seals) == [(10, ONE.id)]
    (freed,) = tracker.release_void()
    assert freed == replace(release("n0", 20), keep=(m.StateId(ONE.id, 10),)), "10 is still to be committed"
    assert tracker.void == {}


def test_a_commit_that_failed_waits_for_a_newer_state(tracker: CheckpointTracker) -> None:
    seal(tracker, 5)
    tracker.plan(0.0)
    assert not tracker.outdated((5, ONE.id)), "it is no newer than itself"
    seal(tracker, 6)
    assert not tracker.outdated((4, ONE.id))
    assert tracker.pending is not None
    assert tracker.outdated((5, ONE.id))
    assert tracker.pending is None


def test_a_source_without_a_layout_tells_none() -> None:
    source = m.Source("commit", 4, gid(1), manifest="m4")
    two = spec(2, source, None)
    assert known_layouts([two]) == {gid(2): Layout(dp=2)}
    told = replace(two, source=replace(source, layout=Layout(tp=2)))
    assert known_layouts([ONE, told]) == {gid(1): ONE.layout, gid(2): Layout(dp=2)}
    odd = replace(two, source=m.Source("init", layout=Layout(tp=2)))
    assert known_layouts([odd]) == {gid(2): Layout(dp=2)}


def test_the_newest_release_of_a_node_stands_for_all_before_it(tracker: CheckpointTracker) -> None:
    """One that did not arrive is not told again once there is a newer one, even of an older state."""
    assert tracker.release("n0", (20, ONE.id)) == release("n0", 20)
    tracker.voided("n0", (15, ONE.id))
    tracker.voided("n0", (15, ONE.id))  # told twice
    tracker.voided("n0", (12, ONE.id))
    tracker.voided("n1", (12, ONE.id))
    assert tracker.release_void() == [release("n0", 20), release("n1", 12)]
    tracker.node_lost("n0")
    assert tracker.release("n0", (15, ONE.id)) == release("n0", 15), "another agent has told what it holds"


def test_a_slot_that_waits_for_its_next_upload_is_not_released_with_a_later_void_state(
    tracker: CheckpointTracker,
) -> None:
    """Storage was out, a generation broke, and the next one went back to before its newest snapshot."""
    seal(tracker, 5)
    tracker.plan(0.0)
    tracker.uploaded(m.Uploaded("n0", ONE.id, 5, "down"), 1.0)
    seal(tracker, 8)
    two = spec(2, m.Source("slots", 7, ONE.id, snapshot(ONE, 7), layout=ONE.layout), ONE)
    tracker.rewound(two)
    keep = (m.StateId(ONE.id, 5),)
    freed = [replace(release(node, 8), keep=keep) for node in ("n0", "n1")]
    assert tracker.release_void() == freed
    tracker.seals.clear()
    tracker.voided("n0", (8, ONE.id))
    assert tracker.release_void() == freed[:1], "taken from an inventory, nobody told that it was sealed"
    for node in ("n0", "n1"):
        tracker.uploaded(m.Uploaded(node, ONE.id, 5), 2.0)
    tracker.committed = 5
    assert tracker.settled((5, ONE.id), ["n0"]) == [release("n0", 8, 5)], "nothing is spared any more"


def test_a_state_that_gives_way_to_a_newer_one_is_not_spared(tracker: CheckpointTracker) -> None:
    seal(tracker, 4, 5)
    tracker.plan(0.0)
    tracker.uploaded(m.Uploaded("n0", ONE.id, 5, "down"), 0.0)
    seal(tracker, 6)
    commands = of(tracker.plan(0.1), m.Release)
    assert commands == [release("n0", 5), release("n1", 5)]


def test_what_is_older_than_the_newest_commit_is_released_by_a_tracker_that_begins_with_it() -> None:
    """Committed anew, it would be the log's newest commit."""
    tracker = CheckpointTracker(10.0, committed=9)
    assert tracker.sealed((9, ONE.id), "n0", snapshot(ONE, 9), ONE.layout) == [release("n0", 9, 9)]
    assert tracker.sealed((10, ONE.id), "n0", snapshot(ONE, 10), ONE.layout) == []
