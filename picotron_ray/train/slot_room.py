"""Growth of a worker's slots in one generation, and the locking of their pages.

Locking pages may hold a lock of the driver's on which other calls of CUDA wait, of any process of the node.
So it is done before the first step, by one worker of a node at a time (`folder_turn`), and beside the steps
only where a slot has grown there. It has a thread of its own: it cannot be stopped within a slot, so that
nothing but the first step waits for it, and neither a checkpoint nor a flush is behind it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

from picotron_ray.checkpoint.snapshot.folder_turn import folder_turn
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool

POLL_S = 0.1
LOCK_S = 120.0
"""Time for which the locking of one slot counts as moving; what takes longer is judged as a hang."""
TURN_S = 120.0
"""Time limit of the wait for other workers of the node; who waits longer locks nothing in this generation."""
Growth = Callable[[], AbstractContextManager[Callable[[], None]]]

log = logging.getLogger(__name__)


class SlotRoom:
    """Makes slots large enough, and locks their pages, for one generation."""

    def __init__(
        self,
        pool: SlotPool,
        capacity: int,
        complete: Callable[[], SlotKey],
        growth: Growth,
        executor: ThreadPoolExecutor,
    ) -> None:
        """
        Args:
            capacity: bytes of each slot at least.
            complete: key of the newest state that is sealed on all ranks.
            growth: entered while the loop waits; what it yields is called as slots grow or are locked.
            executor: that slots grow in, and nothing writes meanwhile.
        """
        self._pool, self._capacity, self._complete, self._growth = pool, capacity, complete, growth
        self._executor, self._locker = executor, ThreadPoolExecutor(1, thread_name_prefix="slot-locks")
        self._closing, self._hurry, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._growing: Future[None] | None = None
        self._locking: Future[None] | None = None
        self._moves = 0

    @property
    def busy(self) -> bool:
        """Whether slots grow, or their pages are being locked."""
        return any(work is not None and not work.done() for work in (self._growing, self._locking))

    def grow(self) -> None:
        """Make slots large enough in the background, where they are not, and lock those that have grown."""
        if self._pool.short(self._capacity):
            self._growing = self._executor.submit(self._grow)

    def _grow(self) -> None:
        try:
            self._pool.grow(self._capacity, self._complete(), self._may_not_wait)
        finally:
            self.lock_pages()

    def lock_pages(self) -> None:
        """Lock, in the background, the pages of slots whose are not."""
        if self._pool.unlocked and not self._closing.is_set():
            self._locking = self._locker.submit(self._lock_pages)

    def lock_before_steps(self) -> None:
        """Lock pages and wait for it, unless slots grow: then that comes behind."""
        if self._growing is not None and not self._growing.done():
            return
        self.lock_pages()
        if self._locking is not None:
            self._wait(self._locking, LOCK_S)

    def _lock_pages(self) -> None:
        try:
            with folder_turn(self._pool.folder, self._stops, TURN_S) as ours:
                if ours:
                    self._pool.lock_pages(self._stops)
                elif not self._stops():
                    log.warning(
                        "slots' pages are not locked: other workers of this node have locked theirs for"
                        " %.0f s; copies go through a ring of page-locked memory, and steps wait longer",
                        TURN_S,
                    )
        except OSError as error:
            log.warning("slots' pages are not locked, copies go through a ring: %s", error)

    def wait_grown(self) -> None:
        """Wait for slots to grow, but for no lock.

        Raises:
            SlotRoomError: they do not; what fits into them as they are may be written.
        """
        growing, self._growing = self._growing, None
        if growing is not None:
            self._wait(growing, 0.0)
            growing.result()

    def _wait(self, work: Future[None], still_s: float) -> None:
        """Wait for work, for locks until this member is to leave; it moves where it stands still for less."""
        if work.done():
            return
        with self._growth() as moved:
            seen, since = self._moves, time.monotonic()
            while not wait([work], POLL_S).done and not (work is self._locking and self._hurry.is_set()):
                if self._moves != seen:
                    seen, since = self._moves, time.monotonic()
                    moved()
                elif time.monotonic() - since < still_s:
                    moved()

    def _may_not_wait(self) -> bool:
        self._moves += 1  # it is asked between the parts of a slot
        return self._closing.is_set() or self._hurry.is_set()

    def _stops(self) -> bool:
        return self._may_not_wait() or self._ending.is_set()

    def end(self) -> None:
        """Lock no further slot."""
        self._ending.set()

    def stop_waiting(self) -> None:
        """Neither grow nor lock any further slot, and wait for none; any thread may call this."""
        self._hurry.set()

    def close(self) -> None:
        """End what is under way, growth at once. A lock is not waited for: it touches only its slot."""
        self._closing.set()
        self._locker.shutdown(wait=False)
