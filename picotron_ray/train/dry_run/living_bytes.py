"""Bytes of living storages, now and at most."""

from __future__ import annotations

import weakref

import torch


class LivingBytes:
    """Sum of the sizes of all storages that were shown and are alive.

    Fields:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def show(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on, by its size now, until it goes."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            if self._known[key][0] == size:
                return
        else:
            weakref.finalize(storage, self._end, key)
        self.now += size - (self._known[key][0] if key in self._known else 0)
        self._known[key] = size, weakref.ref(storage)
        if self.now > self.peak:
            self.read_again()

    def read_again(self) -> None:
        """Look at the size of every storage: FSDP resizes them without an operator."""
        for key, (_, reference) in list(self._known.items()):
            storage = reference()
            if storage is not None:
                self._known[key] = storage.nbytes(), reference
        self.now = sum(size for size, _ in self._known.values())
        self.peak = max(self.peak, self.now)

    def alive(self, storages: set[int]) -> int:
        """Bytes of ``storages`` that are alive now."""
        return sum(self._known[key][0] for key in storages if key in self._known)

    def _end(self, key: int) -> None:
        if key in self._known:
            self.now -= self._known.pop(key)[0]
