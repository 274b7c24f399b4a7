"""Keeper of the archive: windows and events of the run go to its storage with the commits, and at its end.

All of it happens on a thread of its own, with a storage of its own, so that neither the coordinator's loop
nor a commit waits for it. What waits for storage is bounded: beyond that, windows are thinned and events are
dropped and counted. A failure is told once, and the next commit brings what was left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.errors import StorageError
from picotron_ray.observability.archive import EVENTS, WINDOWS, Segment, kept_events
from picotron_ray.observability.rank_table import RankTable
from picotron_ray.observability.windows import TelemetryWindow, thinned
from picotron_ray.runtime.run_storage.telemetry_archive import ArchiveWriter

log = logging.getLogger(__name__)
LEAST_S = 30.0
"""Least time between two segments, however often the run commits."""
LAST_WAIT_S = 10.0
"""Longest wait for the last segment of a run that ends."""
Events = Callable[[int], list[dict[str, Any]]]
"""Returns the events of the run that are numbered above one."""
Ranks = Callable[[], tuple[RankTable, str] | None]
"""Returns the table of the newest round with its generation."""


class ArchiveKeeper:
    """Archive of one run; any thread may call its methods, none of which blocks but `finish`."""

    def __init__(
        self,
        storage: Callable[[], Storage],
        is_newest: Callable[[], bool | None],
        events: Events,
        ranks: Ranks,
        note: Callable[[str, str, str], None],
    ) -> None:
        """
        Args:
            storage: opens the run's.
            is_newest: whether no newer term was claimed; None: not known.
            note: takes level, kind and text of an event.
        """
        self._storage, self._is_newest = storage, is_newest
        self._events, self._ranks, self._note = events, ranks, note
        self._changed = threading.Condition()
        self._windows: list[TelemetryWindow] = []  # that wait, like the events
        self._waiting: tuple[dict[str, Any], ...] = ()
        self._left_out = self._seen = 0
        self._term = self._asked = self._done = 0
        self._put_s, self._failing, self._closing = float("-inf"), False, False
        self._writer: ArchiveWriter | None = None
        self._thread: threading.Thread | None = None

    def begin(self, term: int) -> None:
        """Archive from now on, in this term."""
        self._term = term

    def add(self, window: TelemetryWindow) -> None:
        """Take a window."""
        with self._changed:
            self._windows.append(window)
            if len(self._windows) > 2 * WINDOWS:
                self._windows = thinned(self._windows, WINDOWS)

    def keep(self) -> None:
        """Have what there is stored, unless the last time was just before."""
        if not self._term or time.monotonic() - self._put_s < LEAST_S:
            return
        self._ask()

    def _ask(self) -> None:
        with self._changed:
            self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_all, name="archive-keeper", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, patience_s: float) -> None:
        """Store what there is at the end of a run, which waits for that up to ``patience_s``."""
        if not self._term:
            return
        self._closing = True
        self._ask()
        with self._changed:
            self._changed.wait_for(lambda: self._done == self._asked, min(patience_s, LAST_WAIT_S))

    # --- on the thread --------------------------------------------------------------------------------------

    def _keep_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done)
                asked = self._asked
            self._try(self._closing)
            with self._changed:
                self._done = asked
                self._changed.notify_all()
                if self._closing:
                    return

    def _try(self, last: bool) -> None:
        self._put_s = time.monotonic()
        try:
            self._store(last)
        except Exception as error:  # whatever it is: training has nothing to do with it
            if self._writer is not None:
                self._writer.forget()
            log.warning("telemetry is not in storage", exc_info=None if _expected(error) else error)
            if not self._failing:
                words = str(error) if _expected(error) else repr(error)
                text = f"telemetry is not in storage yet ({words}); the next commit brings it"
                self._note("warning", "archive", text)
            self._failing = True
        else:
            self._failing = False

    def _store(self, last: bool) -> None:
        if self._writer is None:
            self._writer = ArchiveWriter(self._storage(), self._term, self._is_newest)
        now_s = time.time()
        self._take_events(self._writer.newest_s(now_s))
        with self._changed:
            windows = list(self._windows)
        segment = Segment(tuple(windows), self._waiting, left_out=self._left_out)
        if self._writer.put(segment, now_s, last):
            with self._changed:
                del self._windows[: self._stored(windows)]
            self._waiting, self._left_out = (), 0
        ranks = self._ranks()
        if ranks is not None:
            self._writer.put_ranks(*ranks, now_s, last)

    def _stored(self, windows: list[TelemetryWindow]) -> int:
        """Return how many of the windows that wait now are among those that were stored, or were made of
        them.
        """
        newest = windows[-1].at_s if windows else float("-inf")
        return sum(window.at_s <= newest for window in self._windows)

    def _take_events(self, archived_s: float) -> None:
        """Take what was told since the last time; of earlier terms, what is not in the archive."""
        fresh = self._events(self._seen)
        if not self._seen:
            fresh = [event for event in fresh if event["t"] > archived_s]
        self._seen = max([self._seen, *(event["seq"] for event in fresh)])
        found = kept_events((*self._waiting, *fresh), EVENTS)
        self._left_out += len(self._waiting) + len(fresh) - len(found)
        self._waiting = tuple(dict(event) for event in found)


def _expected(error: Exception) -> bool:
    return isinstance(error, StorageError)
