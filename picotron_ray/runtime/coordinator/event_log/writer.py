"""Writer of the event log, on a thread of its own: no decision waits for a disk.

What the machine handled is put into a bounded queue. The thread turns it into lines, appends them, and leaves
the run's record beside them every ``RECORD_LINES`` lines or ``RECORD_S`` seconds. While the disk is full, or
does not answer, the lines wait; beyond ``MOST_WAITING`` of them new ones are dropped and counted. All of that
is told, and none of it costs the run anything but the log.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from picotron_ray.coordinator.messages import Command, Event
from picotron_ray.coordinator.replay import QuietHeartbeats, event_line, part_header, seal
from picotron_ray.runtime.coordinator.event_log import files

log = logging.getLogger(__name__)
MOST_WAITING = 20_000
RECORD_LINES = 1000
RECORD_S = 60.0
RETRY_S = 1.0
Entry = tuple[int, float, float, Event, tuple[Command, ...], list[Any]]


class EventLogWriter:
    """Log of one term; ``add`` and ``close`` are called on the coordinator's loop."""

    def __init__(
        self,
        folder: Path,
        term: int,
        header: str,
        record: Callable[[], dict[str, Any]],
        note: Callable[[str, str, str], None],
    ) -> None:
        """
        Args:
            header: first line of each of its files.
            record: returns the run's record as of the last line that was added, ``line`` among it.
            note: takes level, kind and text of an event.
        """
        self._folder, self._term, self._header = folder, term, header
        self._record, self._note = record, note
        self._quiet = QuietHeartbeats()
        self._count = self._dropped = 0
        self._waiting: deque[Entry] = deque()
        self._wake, self._closing = threading.Event(), False
        self._file: int | None = None
        self._path, self._part, self._size = files.log_file(folder, term, 0), 0, 0
        self._lines: deque[bytes] = deque()  # encoded, and not on disk yet
        self._failing = self._recordless = False
        self._since_record, self._recorded_s = 0, time.monotonic()
        self._thread = threading.Thread(target=self._write_all, name="event-log", daemon=True)
        self._thread.start()

    # --- on the coordinator's loop -------------------------------------------------------------------------

    def quiet(self, now: float, event: Event) -> None:
        """Take an event that nothing follows from: it goes into the next line."""
        self._quiet.add(now, event)

    def add(self, now: float, slept_s: float, event: Event, commands: Sequence[Command]) -> None:
        """Take an event with what the machine answered; never blocks."""
        self._count += 1
        if len(self._waiting) >= MOST_WAITING:
            self._dropped += 1
        else:
            self._waiting.append((self._count, now, slept_s, event, tuple(commands), self._quiet.take()))
            self._wake.set()

    @property
    def next_line(self) -> int:
        """Number of the line that the next ``add`` makes."""
        return self._count + 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, as far as that goes in ``timeout_s``."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    # --- on the thread --------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while not (self._closing and not self._waiting):
            self._wake.wait(RETRY_S)
            self._wake.clear()
            try:
                self._write_waiting()
            except Exception as error:  # noqa: BLE001 (told by _fails; the thread goes on)
                self._fails(error)
                if self._closing:
                    return
                time.sleep(RETRY_S)
            else:
                self._works()

    def _write_waiting(self) -> None:
        while self._lines or self._waiting:
            if not self._lines and not self._encode_next():
                continue
            self._append(self._lines[0])
            self._lines.popleft()
            self._since_record += 1
            if self._since_record >= RECORD_LINES:
                self._write_record()
        if self._since_record and (self._closing or time.monotonic() - self._recorded_s >= RECORD_S):
            self._write_record()

    def _encode_next(self) -> bool:
        """Encode the next entry; False where that cannot be done: the entry is counted as missing."""
        number, now, slept_s, event, commands, heard = self._waiting.popleft()
        more: dict[str, Any] = {"i": number, "slept": slept_s}
        if heard:
            more["heard"] = heard
        try:
            line = event_line(now, event, commands, **more)
        except Exception as error:  # noqa: BLE001 (logged, and counted as missing)
            log.error("event log: %s cannot be written: %r", event, error)
            self._dropped += 1
            return False
        self._lines.append(f"{seal(line)}\n".encode())
        return True

    def _append(self, line: bytes) -> None:
        """Append a line whole, or not at all."""
        self._write(self._opened(len(line)), line)

    def _write(self, file: int, line: bytes) -> None:
        written = 0
        try:
            written = os.write(file, line)
        finally:
            if written < len(line):
                os.ftruncate(file, self._size)
        if written < len(line):
            raise OSError(errno.ENOSPC, "only a part of a line was written")
        self._size += len(line)

    def _opened(self, more: int) -> int:
        """Return the file to append to; a new one where it would grow beyond its share."""
        if self._file is not None and self._size + more > files.PART_BYTES:
            os.close(self._file)
            self._file, self._part = None, self._part + 1
        if self._file is None:
            self._path = files.log_file(self._folder, self._term, self._part)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            self._size = 0
            try:
                header = part_header(self._header, self._part) if self._part else self._header
                self._write(file, f"{seal(header)}\n".encode())
            except OSError:
                os.close(file)
                raise
            self._file = file
            files.prune(self._folder, self._path)
        return self._file

    def _write_record(self) -> None:
        """Leave the run's record; one that cannot be made is tried again later, and holds up no line."""
        place = {"file": self._path.name, "offset": self._size}
        try:
            files.write_record(self._folder, {**self._record(), **place})
            self._recordless = False
        except OSError:
            raise
        except Exception as error:
            if not self._recordless:
                log.error("event log: the run's record cannot be made", exc_info=error)
                text = f"the run's record cannot be made ({error!r}); it is tried again, its log goes on"
                self._note("error", "event-log", text)
            self._recordless = True
        self._since_record, self._recorded_s = 0, time.monotonic()

    def _fails(self, error: Exception) -> None:
        if not self._failing:
            log.warning("event log: %r", error, exc_info=error)
            words = str(error) if isinstance(error, OSError) else repr(error)
            text = f"the event log cannot be written ({words}); the run goes on without it"
            self._note("warning", "event-log", text)
        self._failing = True

    def _works(self) -> None:
        if self._failing:
            lost, self._dropped = self._dropped, 0
            text = f"; {lost} events are missing from it" if lost else ""
            self._note("info", "event-log", f"the event log is written again{text}")
        self._failing = False
