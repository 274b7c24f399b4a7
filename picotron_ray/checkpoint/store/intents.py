"""Intents of the saves of one node: what garbage collection must spare, for as long as the save goes on.

Collection takes an intent that is older than its grace time for that of a dead save (``gc.py``). A save may
take longer, as other nodes' parts belong to it too. So intents are renewed until their state is settled:
committed or given up. A node that dies renews no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, encode_json
from picotron_ray.checkpoint.store.absent import CondemnedReader

log = logging.getLogger(__name__)
RENEW_S = 15.0  # well below the 60 s that collection gives every intent
StateKey = tuple[int, int, int]


class Intents:
    """Intents of one node, renewed by one thread while there are any."""

    def __init__(self, storage: Storage, renew_s: float = RENEW_S) -> None:
        self._storage, self._renew_s = storage, renew_s
        self.condemned = CondemnedReader()  # of the same node: what its saves go by
        self._lock = threading.Lock()
        self._live: dict[str, tuple[StateKey, bytes]] = {}
        self._settled: set[str] = set()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def put(
        self, key: str, state: StateKey, chunks: Sequence[str] | None, obeyed: Collection[str] = ()
    ) -> None:
        """Put an intent and renew it from now on.

        Args:
            chunks: that the save counts on; None where they are not known yet.
            obeyed: keys of condemned lists, none of whose chunks it will count on unless it puts them again.
        """
        value: dict[str, Any] = {"chunks": None if chunks is None else sorted(chunks)}
        if obeyed:
            value["obeyed"] = sorted(obeyed)
        data = encode_json(value)
        self._storage.put(key, data)
        with self._lock:
            self._live[key] = (state, data)
            self._settled.discard(key)
            if self._thread is None:
                self._thread = self._spawn()

    def drop(self, key: str) -> None:
        """Renew an intent no more: its save has failed."""
        with self._lock:
            self._live.pop(key, None)
        self._wake.set()

    def settle(self, state: StateKey, spared: Collection[StateKey] = ()) -> None:
        """Remove the intents of states up to this one; the thread does, so this never waits for storage.

        Args:
            spared: states among them that are still to be committed.
        """
        with self._lock:
            done = [k for k, (other, _) in self._live.items() if other <= state and other not in spared]
            for key in done:
                del self._live[key]
            self._settled.update(done)
        self._wake.set()

    def _spawn(self) -> threading.Thread:
        thread = threading.Thread(target=self._renew, name="intents", daemon=True)
        thread.start()
        return thread

    def _renew(self) -> None:
        while True:
            self._wake.wait(self._renew_s)
            self._wake.clear()
            with self._lock:
                settled, self._settled = self._settled, set()
                live = list(self._live.items())
                if not live and not settled:
                    self._thread = None
                    return
            for key in settled:
                self._try(key, None)
            for key, (_, data) in live:
                with self._lock:
                    if self._live.get(key, (None, None))[1] is not data:
                        continue
                self._try(key, data)

    def _try(self, key: str, data: bytes | None) -> None:
        try:
            if data is None:
                self._storage.delete(key)  # a renewal may have come after the commit that removed it
            else:
                self._storage.put(key, data)
        except Exception as error:  # noqa: BLE001 - storage, or no thread for its call: this thread has to go on
            log.warning("intent %s: %r", key, error)  # the next renewal tries again; a dead one is collected
