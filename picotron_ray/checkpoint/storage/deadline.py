"""Deadline of every storage call, whatever hangs below it.

A mount whose server is gone blocks a thread in the kernel, where nothing can wake it; a server that sends one
byte in a while never runs into a socket's timeout. So each call runs in a thread of its own and is given up
after ``storage.call_timeout_s``. The caller gets StorageUnavailableError, as after any outage. The thread is
left behind, and its call may still happen later. Reads and writes are safe against that, as they are against
a lost reply: content goes with its name. A delete is not, as an object may have been put again by then. So
``deletions_given_up`` names it until it has ended, and no commit counts on it meanwhile.

Threads that hang are counted. While ``MOST_HANGING`` of them do, further calls are refused at once, but for
one in every ``storage.call_timeout_s``: calls that hang on a mount that was replaced never wake.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import TypeVar

from picotron_ray.checkpoint.storage.base import Storage, StoredObject
from picotron_ray.errors import StorageUnavailableError

MOST_HANGING = 32
LISTED_AT_ONCE = 1000  # objects of a listing that share one call, and so one deadline
T = TypeVar("T")


class DeadlineStorage:
    """A storage whose calls end in time.

    Example:
        >>> from picotron_ray.checkpoint.storage.local import LocalStorage
        >>> storage = DeadlineStorage(LocalStorage("/tmp", "doctest"), 60.0)
        >>> storage.size("nothing") is None
        True
    """

    def __init__(self, storage: Storage, limit_s: float, on_answer: Callable[[], None] | None = None) -> None:
        """
        Args:
            on_answer: called, from any thread, whenever a call has succeeded.
        """
        self._storage, self._limit_s = storage, limit_s
        self._on_answer = on_answer
        self._hanging, self._next_turn = 0, 0.0
        self._leaving: Counter[str] = Counter()  # keys whose deletion was given up and has not ended
        self._lock = threading.RLock()

    @property
    def where(self) -> str:
        return self._storage.where

    def put(self, key: str, data: bytes) -> None:
        self._timed(key, lambda: self._storage.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._timed(key, lambda: self._storage.put_if_absent(key, data))

    def get(self, key: str) -> bytes:
        return self._timed(key, lambda: self._storage.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._timed(key, lambda: self._storage.get_range(key, start, length))

    def size(self, key: str) -> int | None:
        return self._timed(key, lambda: self._storage.size(key))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        listing = self._storage.list(prefix)
        while batch := self._timed(prefix, lambda: tuple(islice(listing, LISTED_AT_ONCE))):
            yield from batch

    def delete(self, key: str) -> None:
        if key in self.leaving:
            raise StorageUnavailableError(
                f"{self.where}: a deletion of {key} hangs, another is not tried; check the mount or network"
            )
        self._timed(key, lambda: self._storage.delete(key), late=(key,))

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        hung = self.leaving.intersection(keys)
        tried = [key for key in keys if key not in hung]
        if not tried:
            return keys
        left = self._timed(tried[0], lambda: self._storage.delete_many(tried, until_s), late=tried)
        return [*left, *hung]

    @property
    def leaving(self) -> frozenset[str]:
        """Keys of objects that may go at any time, as their deletion was given up."""
        with self._lock:
            return frozenset(self._leaving)

    def _timed(self, key: str, call: Callable[[], T], late: Sequence[str] = ()) -> T:
        """Make a call in a thread of its own; StorageUnavailableError where it does not end in time.

        Args:
            late: keys that are in ``leaving`` from then until the call has ended.
        """
        if self._hanging >= MOST_HANGING and not self._is_turn():
            raise StorageUnavailableError(
                f"{self.where}: {self._hanging} calls hang, {key} is not tried; check the mount or network"
            )
        answer: Future[T] = Future()
        threading.Thread(target=self._run, args=(answer, call), name="storage-call", daemon=True).start()
        try:
            return answer.result(self._limit_s)
        except TimeoutError:
            with self._lock:
                self._hanging += 1
                self._next_turn = time.monotonic() + self._limit_s
                self._leaving.update(late)
                # called at once, where it answered in this very moment
                answer.add_done_callback(partial(self._woke, late))
            raise StorageUnavailableError(
                f"{self.where} gave no answer at {key} for {self._limit_s:g} s (storage.call_timeout_s);"
                " check the mount or network"
            ) from None

    def _is_turn(self) -> bool:
        """Whether this call is the one that finds out if storage answers again."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_turn:
                return False
            self._next_turn = now + self._limit_s
            return True

    def _run(self, answer: Future[T], call: Callable[[], T]) -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller raises it
            answer.set_exception(error)
        else:
            if self._on_answer is not None:
                self._on_answer()
            answer.set_result(value)

    def _woke(self, late: Sequence[str], _: Future[T]) -> None:
        with self._lock:
            self._hanging -= 1
            self._leaving = self._leaving - Counter(late)


def deletions_given_up(storage: Storage) -> frozenset[str]:
    """Keys of objects of a storage that may go at any time, as this process has given up their deletion."""
    return storage.leaving if isinstance(storage, DeadlineStorage) else frozenset()
