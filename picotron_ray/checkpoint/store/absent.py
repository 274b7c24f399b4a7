"""Chunks that a writer treats as absent: condemned by garbage collection (``gc.py``), or found damaged.

A large run has hundreds of condemned lists at a time, and each of its nodes looks at them before each upload.
So what a list names is read once: lists have names of their own and never change. Of an address 8 bytes are
kept. Two that agree in those are taken for one, and a chunk that is there may then be put again, which harms
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store import condemned

_DIGITS = 16  # of an address, in hexadecimal: 8 bytes
Short = NDArray[np.uint64]


class AbsentChunks:
    """Set of addresses to ask by ``in``; it may hold one that was not put in, in 2**-64 a name."""

    def __init__(self, damaged: Iterable[str], names: Short) -> None:
        """``names``: beginnings of condemned addresses, sorted."""
        self._damaged, self._names = frozenset(damaged), names

    def __contains__(self, address: str) -> bool:
        if address in self._damaged:
            return True
        short = np.uint64(int(address[:_DIGITS], 16))
        at = int(np.searchsorted(self._names, short))
        return at < len(self._names) and bool(self._names[at] == short)


class CondemnedReader:
    """Reader of a node's condemned lists, which remembers those that it has read. Any thread may look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Short] = {}
        self._all: tuple[frozenset[str], Short] = frozenset(), _short(())

    def look(self, storage: Storage) -> tuple[AbsentChunks, set[str]]:
        """Return what a writer must treat as absent now, and the keys of the lists that it is from.

        Those are the lists that can be read.
        """
        damaged = {entry.key.rpartition("/")[2] for entry in storage.list("quarantine/chunks/")}
        entries = list(storage.list(condemned.PREFIX))
        with self._lock:
            there = {entry.key for entry in entries}
            known = {key: names for key, names in self._known.items() if key in there}
        for entry in entries:
            if entry.key not in known:
                lists, _ = condemned.read_lists(storage, [entry])
                known.update((each.key, _short(each.chunks)) for each in lists)
        with self._lock:
            self._known = known
            if self._all[0] != known.keys():
                self._all = frozenset(known), np.unique(np.concatenate([_short(()), *known.values()]))
            return AbsentChunks(damaged, self._all[1]), set(known)


def _short(addresses: Iterable[str]) -> Short:
    return np.fromiter((int(address[:_DIGITS], 16) for address in addresses), dtype=np.uint64)
