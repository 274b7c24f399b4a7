"""The queue of log entries by itself: one in flight, in order, tried again later and later."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.append_queue import BACKOFF_S, AppendQueue, backoff
from picotron_ray.layout.layout import Layout

A, B = m.GenerationId(1, 1), m.GenerationId(1, 2)
SPEC = m.GenerationSpec(A, (m.Member("w1", "n1"),), Layout(), m.Source("init"), "start")
GENERATION = m.AppendGeneration(SPEC)
FIVE, SIX, SEVEN = (m.AppendCommit(A, step, ("n1",)) for step in (5, 6, 7))
WRITTEN = m.Appended("generation", A, 0, 1)
DOWN = m.Appended("commit", A, 5, error="down")


def test_waits_grow_up_to_the_last_one() -> None:
    assert [backoff(attempt) for attempt in range(8)] == [*BACKOFF_S, BACKOFF_S[-1], BACKOFF_S[-1]]


def test_an_entry_is_written_again_where_no_reply_comes() -> None:
    queue = AppendQueue(reply_timeout_s=4.0)
    assert (queue.pump(1.0), queue.wake_at, queue.newest_commit()) == ([], None, None)
    queue.push(GENERATION)
    queue.push(FIVE)
    assert (queue.wake_at, queue.newest_commit()) == (0.0, FIVE)
    assert queue.pump(1.0) == [GENERATION]
    assert (queue.wake_at, queue.pump(4.9), queue.pump(5.0)) == (5.0, [], [GENERATION])
    queue.push(SIX)
    assert (queue.wake_at, queue.newest_commit()) == (9.0, SIX), "the one in flight is not asked for anew"
    assert queue.settle(WRITTEN, 5.1) == GENERATION, "number 1 of the log is a number"
    assert queue.settle(WRITTEN, 5.1) is None, "seen before"
    assert queue.pump(5.1) == [FIVE]


def test_an_entry_that_is_given_up_makes_way_for_those_behind_it() -> None:
    queue = AppendQueue(reply_timeout_s=4.0)
    for entry in (FIVE, SIX):
        queue.push(entry)
    assert queue.pump(1.0) == [FIVE]
    queue.give_up(m.Appended("commit", A, 6, error="down"))
    assert queue.pump(2.0) == [], "another one's answer"
    queue.give_up(DOWN)
    assert queue.pump(2.0) == [SIX]
    queue.give_up(m.Appended("commit", A, 6, error="down"))
    queue.give_up(DOWN)
    assert (queue.pump(9.0), queue.wake_at) == ([], None)


def test_errors_are_tried_again_later_and_later_until_one_succeeds() -> None:
    queue = AppendQueue(reply_timeout_s=4.0)
    for entry in (FIVE, SIX):
        queue.push(entry)
    for now, due in ((10.0, 10.5), (20.0, 21.0), (30.0, 32.0)):
        assert queue.pump(now) == [FIVE]
        assert queue.settle(DOWN, now) is None
        assert (queue.in_flight, queue.wake_at) == (False, due)
    assert (queue.pump(31.9), queue.pump(32.0)) == ([], [FIVE])
    assert queue.settle(m.Appended("commit", A, 6, 9), 32.0) is None, "of another step"
    assert queue.settle(m.Appended("commit", B, 5, 9), 32.0) is None, "of another generation"
    assert queue.settle(m.Appended("commit", A, 5, 9), 32.0) == FIVE
    assert (queue.in_flight, queue.wake_at) == (False, 0.0)
    assert queue.pump(33.0) == [SIX]
    queue.settle(m.Appended("commit", A, 6, error="down"), 33.0)
    assert queue.wake_at == 33.5, "counted anew"
    queue.entries.clear()
    assert queue.settle(DOWN, 34.0) is None
    queue.push(SEVEN)
    assert (queue.wake_at, queue.attempt) == (0.0, 0), "a queue that was empty starts anew"


def test_only_a_commit_that_is_on_its_way_is_kept() -> None:
    queue = AppendQueue(reply_timeout_s=4.0)
    for entry in (FIVE, SIX, GENERATION, SEVEN):
        queue.push(entry)
    queue.pump(1.0)
    queue.drop_commits()
    assert list(queue.entries) == [FIVE, GENERATION]
    queue.settle(DOWN, 1.0)
    queue.drop_commits()
    assert list(queue.entries) == [GENERATION], "it failed"
    queue.push(SIX)
    queue.pump(2.0)
    queue.settle(WRITTEN, 2.0)
    queue.drop_commits()
    assert list(queue.entries) == [], "nobody asked for it yet"
