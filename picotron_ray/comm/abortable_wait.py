"""Abortable waits for gloo operations, also for those that gloo forgets to end.

An inline write to a connection fails when the peer was killed or has closed first. gloo then reports the
error to the operations that are queued, and queues this one afterwards, so that nobody wakes it
(``gloo::transport::tcp::Pair::sendAsyncMode``). Its ``waitSend`` sleeps for the whole timeout of the group,
with all connections already closed. Measured with torch 2.13: about 1 abort in 50 leaves one rank like that.

The operation runs on one of gloo's threads, so only the wait for it has to be given up. Every Python caller
waits through ``Work.wait`` (collectives, FSDP2, pipeline schedules). It is replaced by a wait that asks every
50 ms whether the generation was aborted. Waits that take no time limit (sends, reduce-scatter) move to a
thread of ours.

An abandoned operation stays alive until its timeout has passed (group_release.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]

from picotron_ray.comm.group_release import leave, park_at_exit
from picotron_ray.errors import PeerLostError

POLL = timedelta(seconds=0.05)
GRACE_S = 0.15  # after an abort, operations end by themselves within this, all but the forgotten ones
_plain_wait: Callable[..., bool] = Work.wait
# gloo waits for these in the calling thread, and wakes them reliably. They must not be polled: a wait
# that runs out closes all connections.
_RECEIVES = {int(OpType.RECV), int(OpType.RECVANYSOURCE)}
# Waits of these ignore a time limit: sends, and operations that gloo composes of others (reduce-scatter).
_UNTIMED = {int(OpType.SEND), int(OpType.UNKNOWN)}


OnWait = Callable[[bool], None]


class AbortWatch:
    """Abort state of one generation, which all its waits watch.

    Fields:
        aborted: set by an abort.
        given_up: whether an operation still runs whose caller has left.
        on_wait: hears the beginning (True) and the end of each wait, on the thread that waits.
    """

    def __init__(self, aborted: threading.Event) -> None:
        self.aborted = aborted
        self.given_up = False
        self.on_wait: OnWait | None = None
        self._waits: queue.SimpleQueue[PendingWait | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, work: Any) -> bool:
        """Wait for an operation; raises PeerLostError where an abort leaves it running."""
        kind = int(work._get_op_type())
        if kind in _RECEIVES:
            return _plain_wait(work)
        return self._wait_elsewhere(work) if kind in _UNTIMED else self._wait_polling(work)

    def _wait_polling(self, work: Any) -> bool:
        while True:
            aborted = self.aborted.is_set()
            try:
                return _plain_wait(work, timedelta(seconds=GRACE_S) if aborted else POLL)
            except RuntimeError:
                if work.is_completed():
                    return _plain_wait(work)  # raises what ended it
                if aborted:
                    self._give_up()

    def _wait_elsewhere(self, work: Any) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gloo-waits", daemon=True)
            park_at_exit(self._thread)
            self._thread.start()
        pending = PendingWait(work)
        self._waits.put(pending)
        while not pending.done.wait(POLL.total_seconds()):
            if self.aborted.is_set() and not pending.done.wait(GRACE_S):
                self._give_up()
        if pending.error is not None:
            raise pending.error
        return True

    def _run(self) -> None:
        while (pending := self._waits.get()) is not None:
            try:
                _plain_wait(pending.work)
            except RuntimeError as error:
                pending.error = error
            pending.work = None
            pending.done.set()
        leave(threading.current_thread())

    def _give_up(self) -> None:
        self.given_up = True
        raise PeerLostError("aborted, with an operation that gloo does not end")

    def close(self) -> None:
        """End the thread of waits."""
        self._waits.put(None)


class PendingWait:
    """Operation that another thread waits for."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: RuntimeError | None = None


_watch: AbortWatch | None = None


def _wait(work: Any, timeout: timedelta = timedelta(0)) -> bool:
    """Stand in for ``Work.wait``."""
    if _watch is None or timeout:
        return _plain_wait(work, timeout)
    on_wait = _watch.on_wait
    if on_wait is None:
        return _watch.wait(work)
    on_wait(True)
    try:
        return _watch.wait(work)
    finally:
        on_wait(False)


def listen(on_wait: OnWait) -> None:
    """Let ``on_wait`` hear of the waits of this generation; where none is watched (NCCL), of nothing."""
    if _watch is not None:
        _watch.on_wait = on_wait


def watch(aborted: threading.Event) -> AbortWatch:
    """Let ``aborted`` end the waits of this process from now on; one generation at a time."""
    global _watch
    _watch = AbortWatch(aborted)
    Work.wait = _wait  # type: ignore[method-assign, assignment]
    return _watch


def unwatch() -> None:
    """Put torch's own wait back."""
    global _watch
    if _watch is not None:
        _watch.close()
    _watch = None
    Work.wait = _plain_wait  # type: ignore[method-assign]
