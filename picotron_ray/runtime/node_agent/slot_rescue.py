"""Rescue of slots out of files that were deleted, and that their workers still hold open (`/proc/PID/fd`).

Such a file takes its room for as long as anybody has it open, and a snapshot folder is often as large as its
slots: there is no room for copies. So slots are moved, piece by piece from their ends, and what was moved is
cut off the source. What is not sealed goes first, for it is worth nothing. Of the rest the newest state comes
first that all workers of its generation have sealed, then the others, the newest first; where room is short,
the last one gives its own.

The files are opened before anything is moved, so that none is lost with its worker's process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.checkpoint.snapshot.slot_reader import read_header
from picotron_ray.errors import SlotError

log = logging.getLogger(__name__)
THREADS = 4
PART_BYTES = 16 << 20
PIECE_BYTES = THREADS * PART_BYTES
LEAST_S = 10.0
SLOWEST_BYTES_PER_S = 200e6
"""A rescue takes at most ``LEAST_S`` and the time of its bytes at this rate; memory is ten times as fast."""
NO_ROOM = (ENOSPC, EDQUOT)
DELETED = " (deleted)"  # after the target of a link in /proc/PID/fd
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """Deleted slot file that a worker holds open; ``key`` None: it is not sealed."""

    name: str
    pid: int
    descriptor: int
    key: SlotKey | None

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def drop(self) -> None:
        """Give its room back."""
        os.ftruncate(self.descriptor, 0)


def deleted_files(pid: int, folder: Path, suffix: str) -> Iterator[tuple[Path, str]]:
    """Yield files of a folder that a process holds open though they were deleted: path, and name in there."""
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        target = ""
        with suppress(OSError):  # it has ended, or is not ours to look at
            target = os.readlink(path)
        name = Path(target.removesuffix(DELETED))
        if target.endswith(DELETED) and name.parent == folder and name.suffix == suffix:
            yield path, name.name


def held_slots(pids: Iterable[int], folder: Path) -> list[HeldSlot]:
    """Open the deleted slots of a folder that processes hold, each once; for `close` to close."""
    found: dict[tuple[int, int], HeldSlot] = {}
    for pid in pids:
        for path, name in deleted_files(pid, folder, SUFFIX):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                log.warning("slot %s that process %d holds open cannot be read: %s", name, pid, error)
                continue
            stat = os.fstat(descriptor)
            if stat.st_nlink or (stat.st_dev, stat.st_ino) in found:
                os.close(descriptor)
            else:
                found[stat.st_dev, stat.st_ino] = HeldSlot(name, pid, descriptor, _key(descriptor))
    return list(found.values())


def _key(descriptor: int) -> SlotKey | None:
    try:
        header = read_header(f"/proc/self/fd/{descriptor}")
    except SlotError:
        return None
    return None if header is None else header.key


def close(slots: Iterable[HeldSlot]) -> None:
    """Close what `held_slots` has opened."""
    for slot in slots:
        os.close(slot.descriptor)


def in_order(slots: Sequence[HeldSlot]) -> list[HeldSlot]:
    """Sealed slots in the order in which they are worth saving."""
    sealed: dict[SlotKey, set[int]] = {}
    members: dict[tuple[int, int], set[int]] = {}
    for slot in slots:
        if slot.key is not None:
            sealed.setdefault(slot.key, set()).add(slot.pid)
            members.setdefault(slot.key[:2], set()).add(slot.pid)
    whole = max((key for key, pids in sealed.items() if pids == members[key[:2]]), default=None)
    worth = {slot: (slot.key == whole, slot.key) for slot in slots if slot.key is not None}
    return sorted(worth, key=worth.__getitem__, reverse=True)


def limit_s(slots: Sequence[HeldSlot]) -> float:
    """Longest that the rescue of these slots may take."""
    return LEAST_S + sum(slot.size for slot in slots if slot.key is not None) / SLOWEST_BYTES_PER_S


class Move:
    """Move of slots into a folder; ``saved`` counts those that are there."""

    def __init__(self, slots: Sequence[HeldSlot], folder: Path, until_s: float, end: threading.Event) -> None:
        """
        Args:
            until_s: on the monotonic clock; nothing is moved after that.
            end: nothing is moved once it is set.
        """
        self._waiting, self._folder = in_order(slots), folder
        self._unsealed = [slot for slot in slots if slot.key is None]
        self._until_s, self._end = until_s, end
        self._lock = threading.Lock()
        self.saved = 0

    def run(self) -> None:
        """Move all that can be, one slot at a time: its parts are copied side by side."""
        for slot in self._unsealed:
            slot.drop()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="slot-rescue") as threads:
            while self._waiting and not self._over():
                self.saved += self._saved(self._waiting.pop(0), threads)

    def _over(self) -> bool:
        return self._end.is_set() or time.monotonic() > self._until_s

    def _saved(self, slot: HeldSlot, threads: ThreadPoolExecutor) -> bool:
        """Move a slot; False where there is no room or no time for it, or a file of its name is there."""
        target = self._folder / slot.name
        temporary = target.with_suffix(".new")
        if target.exists():
            return False
        try:
            file = os.open(temporary, CREATE, 0o600)
            try:
                self._move(slot, file, threads)
            finally:
                os.close(file)
            temporary.rename(target)
        except OSError as error:
            log.warning("slot %s is lost with its folder: %s", slot.name, error)
            temporary.unlink(missing_ok=True)
            return False
        return True

    def _move(self, slot: HeldSlot, file: int, threads: ThreadPoolExecutor) -> None:
        def copy(start: int) -> None:
            self._copy(slot.descriptor, file, start, min(start + PART_BYTES, end))

        end = slot.size
        while end > 0:
            if self._over():
                raise TimeoutError("its rescue takes too long")
            first = (end - 1) // PIECE_BYTES * PIECE_BYTES
            list(threads.map(copy, range(first, end, PART_BYTES)))
            os.ftruncate(slot.descriptor, first)
            end = first

    def _copy(self, source: int, file: int, start: int, end: int) -> None:
        data = memoryview(os.pread(source, end - start, start))
        if len(data) < end - start:
            raise OSError("it was cut off meanwhile")
        while data:
            try:
                written = os.pwrite(file, data, start)
            except OSError as error:
                if error.errno not in NO_ROOM or not self._give_up_last():
                    raise
                continue
            data, start = data[written:], start + written

    def _give_up_last(self) -> bool:
        """Give up the slot that is worth least, for its room; False where none is left."""
        with self._lock:
            if not self._waiting:
                return False
            slot = self._waiting.pop()
            slot.drop()
        log.warning("slot %s is given up: there is no room to save it", slot.name)
        return True
