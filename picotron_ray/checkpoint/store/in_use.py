"""Objects that commits under way need, kept from a collection that works beside them.

A commit looks whether all of its objects are there, and only then writes the log's entry. A collection on
another thread of the same coordinator may have chosen one of them for deletion before that. So a commit says
what it needs *before* its look (``needed``), and a collection asks right before each deletion
(``deletion``). From then on the commit's objects are safe, but for those that the commit was told of.

What a commit said is remembered for as long as a collection may not know its entry: to the end of the one
that was under way beside it and, where the answer of the log was lost, until a later commit succeeds, which
settles what the log holds.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class InUse:
    """Objects by name, which is their key up to its first dot: a manifest's may get a number behind it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed: list[frozenset[str]] = []  # by commits under way
        self._lately: list[frozenset[str]] = []  # by commits that ended beside the collection under way
        self._unknown: frozenset[str] = frozenset()  # by the last one that failed
        self._going: frozenset[str] = frozenset()  # keys that are being deleted
        self._collecting = False

    @contextmanager
    def needed(self, keys: Collection[str]) -> Iterator[frozenset[str]]:
        """Keep objects from deletion for as long as a commit is made; yields those that are being deleted."""
        names = frozenset(map(_name, keys))
        with self._lock:
            self._needed.append(names)
            going = frozenset(key for key in self._going if _name(key) in names)
        committed = False
        try:
            yield going
            committed = True
        finally:
            with self._lock:
                self._needed.remove(names)
                self._unknown = frozenset() if committed else names
                if self._collecting:
                    self._lately.append(names)

    @contextmanager
    def collection(self) -> Iterator[None]:
        """Mark a collection's time, from before it reads intents and the log to its last deletion."""
        with self._lock:
            self._collecting = True
        try:
            yield
        finally:
            with self._lock:
                self._collecting = False
                self._lately.clear()

    @contextmanager
    def deletion(self, keys: Collection[str]) -> Iterator[list[str]]:
        """Yield those of some keys that may be deleted, and mark them until that is over."""
        with self._lock:
            spared = [*self._needed, *self._lately, self._unknown]
            free = [key for key in keys if not any(_name(key) in names for names in spared)]
            self._going = frozenset(free)
        try:
            yield free
        finally:
            with self._lock:
                self._going = frozenset()


def _name(key: str) -> str:
    return key.partition(".")[0]
