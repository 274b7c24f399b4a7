"""Abortable waits, of operations that are made up: who waits how, and what an abort does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]

from picotron_ray.comm import abortable_wait, group_release
from picotron_ray.comm.abortable_wait import GRACE_S, POLL, AbortWatch
from picotron_ray.errors import PeerLostError

GRACE = timedelta(seconds=GRACE_S)
RAN_OUT = RuntimeError("the wait ran out")


class Operation:
    """Stands in for torch's: ``plain`` is what its own wait does, given a limit or None."""

    def __init__(self, kind: OpType, plain: Callable[[timedelta | None], bool], completed: bool = False):
        self.kind, self.plain, self.completed = kind, plain, completed
        self.limits: list[timedelta | None] = []

    def _get_op_type(self) -> OpType:
        return self.kind

    def is_completed(self) -> bool:
        return self.completed


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain_wait(work: Operation, limit: timedelta | None = None) -> bool:
        work.limits.append(limit)
        assert len(work.limits) < 10, "it is asked for ever"
        return work.plain(limit)

    monkeypatch.setattr(abortable_wait, "_plain_wait", plain_wait)


@pytest.fixture
def aborted() -> Iterator[threading.Event]:
    """Set by itself after 5 s, so that a wait that nobody ends is given up."""
    event = threading.Event()
    end = threading.Timer(5, event.set)
    end.daemon = True
    end.start()
    yield event
    end.cancel()


@pytest.fixture
def watching(aborted: threading.Event) -> Iterator[AbortWatch]:
    found = AbortWatch(aborted)
    yield found
    found.close()
    if found._thread is not None:
        found._thread.join(5)
        assert found._thread not in group_release._inside_torch


def out_of_time(limit: timedelta | None) -> bool:
    raise RAN_OUT


@pytest.mark.parametrize("kind", [OpType.RECV, OpType.RECVANYSOURCE])
def test_receives_wait_as_torch_does(watching: AbortWatch, kind: OpType) -> None:
    watching.aborted.set()
    operation = Operation(kind, lambda limit: True)
    assert watching.wait(operation)
    assert operation.limits == [None]
    assert watching._thread is None


def test_a_wait_asks_again_until_the_operation_ends(watching: AbortWatch) -> None:
    answers = iter([False, False, True])

    def plain(limit: timedelta | None) -> bool:
        return next(answers) or out_of_time(limit)

    operation = Operation(OpType.ALLREDUCE, plain)
    assert watching.wait(operation)
    assert operation.limits == [POLL] * 3
    assert not watching.given_up


def test_a_wait_is_given_up_after_one_of_grace(watching: AbortWatch, aborted: threading.Event) -> None:
    def plain(limit: timedelta | None) -> bool:
        aborted.set()
        return out_of_time(limit)

    operation = Operation(OpType.ALLREDUCE, plain)
    with pytest.raises(PeerLostError, match=r"^aborted, with an operation that gloo does not end$"):
        watching.wait(operation)
    assert operation.limits == [POLL, GRACE]
    assert watching.given_up


def test_what_has_ended_an_operation_is_raised(watching: AbortWatch) -> None:
    operation = Operation(OpType.ALLREDUCE, out_of_time, completed=True)
    with pytest.raises(RuntimeError, match="ran out"):
        watching.wait(operation)
    assert operation.limits == [POLL, None]
    assert not watching.given_up


@pytest.mark.parametrize("kind", [OpType.SEND, OpType.UNKNOWN])
def test_waits_without_a_limit_have_a_thread(watching: AbortWatch, kind: OpType) -> None:
    seen: list[threading.Thread] = []

    def plain(limit: timedelta | None) -> bool:
        seen.append(threading.current_thread())
        assert limit is None
        return True

    assert watching.wait(Operation(kind, plain))
    assert watching.wait(Operation(kind, plain))
    assert seen == [watching._thread] * 2
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon
    assert seen[0] in group_release._inside_torch
    with pytest.raises(RuntimeError, match="ran out"):
        watching.wait(Operation(kind, out_of_time))
    assert not watching.given_up


def test_a_wait_of_the_thread_is_given_up(watching: AbortWatch, aborted: threading.Event) -> None:
    ended = threading.Event()
    aborted.set()
    with pytest.raises(PeerLostError):
        watching.wait(Operation(OpType.SEND, lambda limit: ended.wait(10)))
    assert watching.given_up
    ended.set()


def test_a_wait_of_the_thread_may_end_within_the_grace(
    watching: AbortWatch, aborted: threading.Event
) -> None:
    aborted.set()
    late = threading.Event()
    timer = threading.Timer(POLL.total_seconds() + GRACE_S / 4, late.set)
    timer.start()
    assert watching.wait(Operation(OpType.SEND, lambda limit: late.wait(10)))
    assert not watching.given_up
    timer.join()


def test_torchs_wait_is_replaced_and_put_back(
    monkeypatch: pytest.MonkeyPatch, aborted: threading.Event
) -> None:
    monkeypatch.setattr(abortable_wait, "_watch", None)
    monkeypatch.setattr(Work, "wait", "before")
    operation = Operation(OpType.ALLREDUCE, lambda limit: True)
    assert abortable_wait._wait(operation)
    watching = abortable_wait.watch(aborted)
    assert watching.aborted is aborted
    assert Work.wait is abortable_wait._wait
    assert Work.wait(operation)
    assert Work.wait(operation, timedelta(seconds=3))
    assert operation.limits == [timedelta(0), POLL, timedelta(seconds=3)]
    abortable_wait.unwatch()
    assert abortable_wait._watch is None
    assert Work.wait is abortable_wait._plain_wait
    assert watching._waits.get(timeout=1) is None, "its thread is told to end"
    abortable_wait.unwatch()
