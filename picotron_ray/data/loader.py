"""Prefetching batch loader: a thread makes batches ahead of time, off the critical path.

The thread only reads memory-mapped tokens and copies rows; it holds no state that must be saved, since
the batch of any step is a pure function of its number.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from picotron_ray.data.batch import StepBatch, make_batch
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.layout.layout import Layout

POLL_S = 0.1
CLOSE_S = 1.0
"""Longest wait for the thread's end."""


class BatchLoader:
    """Prefetcher of the batches of one DP replica, in step order.

    Args:
        feed: the training samples in their order.
        layout, dp_index: which rows this replica feeds.
        start_step: the step whose state training goes on from; the first batch is ``start_step + 1``.
        depth: batches kept ready.
        passes_over: whether a step has no batch, as a rewind passes over it.
        make: replaces :func:`make_batch` in tests.

    An error of the thread is raised by ``next()``, there and at every later call.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        layout: Layout,
        dp_index: int,
        start_step: int,
        depth: int,
        passes_over: Callable[[int], bool] = lambda step: False,
        make: Callable[[Feed, Layout, int, int], StepBatch] = make_batch,
    ) -> None:
        self._make = lambda step: make(feed, layout, dp_index, step)
        self._let_go = feed.stop
        self._passes_over = passes_over
        self._ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, args=(start_step + 1,), name="loader", daemon=True)
        self._thread.start()

    def _fill(self, step: int) -> None:
        try:
            while not self._closed.is_set():
                if not self._passes_over(step):
                    self._offer(self._make(step))
                step += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, next() raises it
            self._offer(error)

    def _offer(self, item: StepBatch | BaseException) -> None:
        """Put into the queue once there is room; nothing any more after ``close``."""
        while not self._closed.is_set():
            try:
                return self._ready.put(item, timeout=POLL_S)
            except queue.Full:
                continue
        return None

    def next(self) -> StepBatch:
        """Wait for the next step's batch. Raises the thread's error, RuntimeError after ``close``."""
        if self._error is not None:
            raise self._error
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        if item is None:
            raise RuntimeError("the loader was closed while a batch was awaited")
        return item

    def stop_waiting(self) -> None:
        """Make ``next`` raise RuntimeError, in whatever thread it waits; waits for nothing."""
        self._closed.set()
        self._let_go()
        self._drain()
        with contextlib.suppress(queue.Full):
            self._ready.put_nowait(None)

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice and from another thread.

        A thread that waits for a file system which hangs is left behind; it ends when its read does.
        """
        self._closed.set()
        self._let_go()
        until = time.monotonic() + CLOSE_S
        while self._thread.is_alive() and time.monotonic() < until:
            self._drain()
            self._thread.join(0.01)
        self.stop_waiting()

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return
