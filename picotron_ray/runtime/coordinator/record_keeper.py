"""Keeper of the run's record in storage, by which the next coordinator knows what this one knew.

A thread of its own encodes the record and stores it: neither the loop nor a commit that hangs is in its way.
Saves go out one after another, each with the record as it is by then, so that a newer one never waits for an
older one to succeed, and none is overtaken. One that fails is tried again, later each time, until it or a
newer one is stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator.append_queue import backoff
from picotron_ray.errors import StorageError
from picotron_ray.runtime.coordinator.event_log.files import encode_record

log = logging.getLogger(__name__)
LAST_WAIT_S = 60.0
"""Longest wait for the save at the end of a run: what it would add, the event log beside it has too."""


class RecordKeeper:
    """Saves of one run's record; any thread may call its methods."""

    def __init__(
        self,
        memo: Callable[[], dict[str, Any]],
        save: Callable[[bytes], None],
        note: Callable[[str, str, str], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        """
        Args:
            memo: returns the record as it is now.
            save: stores it encoded; StorageError where storage does not take it.
            note: takes level, kind and text of an event.
            failed: hears of errors that nobody expected.
        """
        self._memo, self._save, self._note, self._failed = memo, save, note, failed
        self._changed = threading.Condition()
        self._asked = self._stored = 0  # saves asked for so far, and how many of them are in storage
        self._failures = 0  # in a row
        self._closed = False
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        """Have the record as it is now stored; never blocks."""
        with self._changed:
            self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_all, name="record-keeper", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was asked for is stored; False where ``timeout_s`` passes before."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stored == self._asked, timeout_s)

    def finish(self, patience_s: float) -> None:
        """Store the record at the end of a run, whose end waits for that up to ``patience_s``."""
        self.keep()
        wait_s = min(patience_s, LAST_WAIT_S)
        if not self.wait(wait_s):
            text = f"the run's record as of its end is not in storage after {wait_s:g} s; an older one may be"
            self._note("warning", "record", text)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- on the thread --------------------------------------------------------------------------------------

    def _keep_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._asked > self._stored)
                if self._closed:
                    return
                asked = self._asked
            if self._saved():
                with self._changed:
                    self._stored = asked
                    self._changed.notify_all()
                continue
            self._failures += 1
            with self._changed:  # whoever asks meanwhile has a reason to: a commit went through, for example
                self._changed.wait_for(self._is_asked_since(asked), backoff(self._failures - 1))

    def _is_asked_since(self, asked: int) -> Callable[[], bool]:
        return lambda: self._closed or self._asked > asked

    def _saved(self) -> bool:
        """Store the record as it is now; False where that failed, which is told once."""
        try:
            self._save(encode_record(self._memo()))
        except StorageError as error:
            log.warning("the run's record is not in storage: %s", error)
            if not self._failures:
                text = f"the run's record is not in storage yet ({error}); it is tried again until it is"
                self._note("warning", "record", text)
        except Exception as error:  # noqa: BLE001 (told by failed; tried again like any other)
            self._failed("the run's record", error)
        else:
            if self._failures:
                self._note("info", "record", "the run's record is in storage again")
            self._failures = 0
            return True
        return False
