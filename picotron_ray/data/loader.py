"""Prefetching batch loader: a thread makes batches ahead of time, off the critical path.

The thread only reads memory-mapped tokens and copies rows; it holds no state that must be saved, since
the batch of any step is a pure function of its number.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from picotron_ray.data.batch import StepBatch, make_batch
from picotron_ray.data.samples import Dataset
from picotron_ray.layout.layout import Layout


class BatchLoader:
    """Prefetcher of the batches of one DP replica, in step order.

    Args:
        dataset: the training samples.
        seed: order of samples.
        layout, dp_index: which rows this replica feeds.
        global_batch: samples per step over all replicas.
        start_step: the step whose state training goes on from; the first batch is ``start_step + 1``.
        depth: batches kept ready.
        make: replaces :func:`make_batch` in tests.

    An error of the thread is raised by ``next()``, there and at every later call.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        layout: Layout,
        dp_index: int,
        global_batch: int,
        start_step: int,
        depth: int,
        make: Callable[[Dataset, int, Layout, int, int, int], StepBatch] = make_batch,
    ) -> None:
        self._make = lambda step: make(dataset, seed, layout, dp_index, global_batch, step)
        self._ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, args=(start_step + 1,), name="loader", daemon=True)
        self._thread.start()

    def _fill(self, step: int) -> None:
        try:
            while not self._closed.is_set():
                self._ready.put(self._make(step))
                step += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, next() raises it
            self._ready.put(error)

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

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice and from another thread."""
        self._closed.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(0.01)
        self._drain()
        self._ready.put(None)  # releases a next() that waits in another thread

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return
