"""Store of a node's log lines: files on disk of a bounded size together, the oldest of which goes.

A file is named after the number of its first line. Numbers grow for as long as the folder lives, over the
processes that write to it. So lines that were read in two places (here, and as the tail that was sent to
storage) are known to be the same, and whoever follows asks for those after a number.

Lines that the disk does not take are lost and counted; that is said in a line once it takes them again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from picotron_ray.observability.logs.lines import NOWHERE, decode, encode, read_line

MOST_BYTES = 64 << 20
"""Of the lines of one node."""
FILE_BYTES = 4 << 20
SUFFIX = ".jsonl"
KNOWN = "known.json"
"""File with what a node can say of its lines without reading them: the highest rank that had any."""
LOST = "picotron_ray.logs"
"""Logger of the line that says how many are missing."""


class LogStore:
    """Writer of a folder; one process has it, any thread may call."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._file_bytes = min(FILE_BYTES, max(1, most_bytes // 4))
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._size = 0
        self._seq = self._missing = 0
        self.lines = self.lost = 0
        """Lines that were taken by this process, and those that were not."""
        self._highest = int(read_known(folder).get("highest_rank", -1))
        self._opened = False

    def add(self, entries: Sequence[dict[str, Any]]) -> int:
        """Append lines; those that cannot be written are counted. Returns the number of the newest line."""
        with self._lock:
            before = self._seq
            try:
                self._open()
                if self._missing and entries:
                    self._write([_missing_line(self._missing, entries)])
                    self._missing = 0
                before = self._seq
                self._write(entries)
                self._note_ranks(entries)
            except OSError:
                written = max(0, self._seq - before)
                self.lines += written
                self.lost += len(entries) - written
                self._missing += len(entries) - written
                self._path, self._opened = None, False  # the next try looks again at what is there
            else:
                self.lines += len(entries)
            return self._seq

    def miss(self, lines: int) -> None:
        """Count lines that nobody could read in time."""
        with self._lock:
            self.lost += lines
            self._missing += lines

    def _open(self) -> None:
        """Go on after the newest line that is there."""
        if self._opened:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = log_files(self._folder)
        if files:
            last = max((line["seq"] for line in map(decode, tail(files[-1], FILE_BYTES)) if line), default=0)
            self._seq = max(self._seq, last, first_of(files[-1]) - 1)
        self._opened = True

    def _write(self, entries: Sequence[dict[str, Any]]) -> None:
        place = 0
        while place < len(entries):
            path, room = self._current()
            data, count = bytearray(), 0
            for entry in entries[place:]:
                data += encode(self._seq + count + 1, entry)
                count += 1
                if len(data) >= room:
                    break
            append(path, bytes(data))
            self._size += len(data)
            self._seq += count
            place += count

    def _current(self) -> tuple[Path, int]:
        """Path of the file that is written, and the bytes until it is full."""
        if self._path is None or self._size >= self._file_bytes:
            self._path = self._folder / f"{self._seq + 1:012d}{SUFFIX}"
            self._size = size_of(self._path)
            drop_oldest(self._folder, self._most_bytes - self._file_bytes)
        return self._path, self._file_bytes - self._size

    def _note_ranks(self, entries: Iterable[dict[str, Any]]) -> None:
        highest = max((entry["rank"] for entry in entries if entry.get("rank") is not None), default=-1)
        self.note_rank(highest)

    def note_rank(self, rank: int) -> None:
        """Remember the highest rank that lives here; one that printed nothing is known too."""
        if rank > self._highest and self._folder.is_dir():
            self._highest = rank
            with suppress(OSError):
                (self._folder / KNOWN).write_text(json.dumps({"highest_rank": rank}))


def _missing_line(count: int, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    line = read_line(f"{count} lines of this node are missing here", "stderr", NOWHERE, 0.0)
    assert line is not None
    own = {key: entries[0].get(key) for key in ("time", "node")}
    return {**line, **own, "level": "warning", "logger": LOST, "pid": None, "worker": None}


def append(path: Path, data: bytes) -> None:
    """Append to a file, wholly or not at all. Raises OSError: the disk is full."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(handle).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(handle, view) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def read_known(folder: Path) -> dict[str, Any]:
    """Read what a folder says of its lines; nothing where it says nothing."""
    try:
        found = json.loads((folder / KNOWN).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def log_files(folder: Path) -> list[Path]:
    """Files of a folder, oldest first."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())


def first_of(path: Path) -> int:
    """Number of a file's first line."""
    return int(path.stem)


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 where it has gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def written_s(path: Path) -> float:
    """When a file was written last, in seconds since the epoch; 0 where it has gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def drop_oldest(folder: Path, most_bytes: int) -> None:
    """Remove the oldest files until the rest takes at most so much."""
    files = log_files(folder)
    total = sum(map(size_of, files))
    for path in files:
        if total <= most_bytes:
            return
        total -= size_of(path)
        path.unlink(missing_ok=True)


def tail(path: Path, most_bytes: int) -> list[bytes]:
    """Last whole lines of a file, of at most so many bytes together."""
    try:
        with path.open("rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - most_bytes)
            file.seek(start)
            data = file.read(most_bytes)
    except OSError:
        return []
    lines = data.splitlines(keepends=True)
    return lines[1:] if start else lines


def newest_lines(folder: Path, most_bytes: int, worker: str | None = None) -> list[bytes]:
    """Newest lines of a folder, of at most so many bytes together, oldest first.

    Args:
        worker: whose lines alone; None: all.
    """
    found: list[bytes] = []
    left, mark = most_bytes, None if worker is None else f'"worker":{json.dumps(worker)},'.encode()
    for path in reversed(log_files(folder)):
        for line in reversed(tail(path, FILE_BYTES * 2)):
            if mark is not None and mark not in line:
                continue
            if len(line) > left:
                return found[::-1]
            found.append(line)
            left -= len(line)
    return found[::-1]
