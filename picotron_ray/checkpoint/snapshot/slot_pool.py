"""Slots of one worker: their folder, and the choice of the next one to overwrite.

A slot may be overwritten only when nothing can need it: it is unsealed, or a newer step is sealed on
*all* ranks and no upload pins it. With three slots one is always free, unless ranks drift apart by
more than a step or an upload lags; then that snapshot is skipped and counted by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_file import PageLocks, SlotFile, free_bytes
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey
from picotron_ray.checkpoint.snapshot.slot_reader import read_header
from picotron_ray.errors import SlotError, SlotRoomError

SUFFIX = ".slot"
FEWEST = 2
"""Slots of a worker at least: the state to go back to, and the one that is written."""


class SlotPool:
    """The slot files of one worker, allocated at start.

    Files are named ``<worker>.<index>.slot``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        worker: str,
        count: int,
        capacity: int,
        room_follows: bool = False,
        locks: PageLocks | None = None,
    ) -> None:
        """Allocate ``count`` slots of ``capacity`` bytes.

        Args:
            room_follows: others still hold room that they are about to give; one slot is enough until then,
                and ``fill`` makes the others.
            locks: of slots' pages, for a device that writes into them (`lock_pages`); None: none does.

        Raises:
            SlotError: they do not fit; nothing is left behind.
        """
        self.slots: list[SlotFile] = []
        self.folder, self._worker, self._capacity = Path(folder), worker, capacity
        self.missing, self._made, self._locks = count, 0, locks
        try:
            while self.missing:
                self._add()
        except SlotError:
            if room_follows and self.slots:
                return
            self.close(unlink=True)
            raise

    def fill(self) -> None:
        """Make the slots that had no room, as far as there is room now."""
        while self.missing and free_bytes(self.folder) >= self._capacity:
            try:
                self._add()
            except SlotError:  # somebody else was faster
                return

    def _add(self) -> None:
        path = self.folder / f"{self._worker}.{self._made}{SUFFIX}"
        self.slots.append(SlotFile.create(path, self._capacity))
        self._made += 1
        self.missing -= 1

    def short(self, capacity: int) -> bool:
        """Whether a slot is smaller than ``capacity`` bytes."""
        return any(slot.capacity < capacity for slot in self.slots)

    @property
    def locked(self) -> bool:
        """Whether the pages of all slots are locked, of those too that are still to be made."""
        return not self.missing and all(slot.locked for slot in self.slots)

    @property
    def unlocked(self) -> bool:
        """Whether pages of a slot are still to be locked."""
        return self._locks is not None and not all(slot.locked for slot in self.slots)

    def lock_pages(self, stopped: Callable[[], bool]) -> None:
        """Lock the pages of all slots, until one is refused; ``stopped`` is asked before each.

        It takes long: locking touches every page.
        """
        for slot in self.slots:
            if self._locks is None or stopped():
                return
            if not slot.lock_pages(self._locks):
                self._locks = None  # the next one would be refused too

    def grow(self, capacity: int, newest_complete: SlotKey, stopped: Callable[[], bool]) -> None:
        """Enlarge all slots to ``capacity`` bytes, those first that nothing needs.

        Where there is no room for all, slots that nothing needs are given up, down to two: one for the state
        to go back to, one to write.

        Args:
            newest_complete: as for `choose`.
            stopped: asked now and then; once it is true, the slots stay as large as they have become.

        Raises:
            SlotRoomError: there is no room for two; every state that something needs is still there.
        """
        self._capacity = max(self._capacity, capacity)
        for slot in sorted(self.slots, key=lambda slot: self._needed(slot, newest_complete)):
            while slot in self.slots:
                try:
                    slot.grow(capacity, stopped)
                    break
                except SlotRoomError:
                    if not self._gave_up(slot, newest_complete):
                        raise

    def _gave_up(self, keep: SlotFile, newest_complete: SlotKey) -> bool:
        """Remove one slot but ``keep`` that nothing needs, the smallest; False where there is none.

        `fill` makes another one where there is room again.
        """
        free = [s for s in self.slots if s is not keep and not self._needed(s, newest_complete)]
        if len(self.slots) <= FEWEST or not free:
            return False
        least = min(free, key=lambda slot: slot.capacity)
        self.slots = [slot for slot in self.slots if slot is not least]
        least.close(unlink=True)
        self.missing += 1
        return True

    @staticmethod
    def _needed(slot: SlotFile, newest_complete: SlotKey) -> bool:
        return slot.key is not None and (slot.key >= newest_complete or slot.pinned)

    def choose(
        self,
        newest_complete: SlotKey,
        generation: tuple[int, int] | None = None,
        kept: SlotKey | None = None,
    ) -> SlotFile | None:
        """Choose the slot to write next; None where all are still needed (skip that snapshot).

        Args:
            newest_complete: ``(term, n, step)`` of the newest state that is sealed on all ranks. At
                the start of a generation that resumed from slots: the key of those slots; from a commit
                or from nothing: ``(term, n, -1)`` of the new generation.
            generation: the present one. What earlier ones wrote after ``newest_complete`` is void: it went
                back behind that, at a rewind by more than the slots hold.
            kept: state whose slot is chosen only where there is no other one.

        One whose pages are being locked is chosen only where no other one is as good.
        """
        free = [slot for slot in self.slots if slot.key is None]
        if free:
            return min(free, key=lambda slot: slot.locking)
        self._give_up_pin(newest_complete)
        before = (0, 0, 0) if generation is None else (*generation, -1)
        old = [
            slot
            for slot in self.slots
            if (key := slot.key)
            and not slot.pinned
            and (key < newest_complete or newest_complete < key < before)
        ]
        return min(old, key=lambda slot: (slot.key == kept, slot.locking, _age(slot)), default=None)

    def holding(self, key: SlotKey) -> SlotFile | None:
        """Return the slot that holds a part of this state and that nothing pins; None where there is none."""
        return next((slot for slot in self.slots if slot.key == key and not slot.pinned), None)

    def _give_up_pin(self, newest_complete: SlotKey) -> None:
        """Release the older of two checkpoints that wait for their upload, where no other slot is left.

        Otherwise a coordinator that is away for longer than a checkpoint interval would leave no slot for
        snapshots, and the run would lose all steps since. An upload that finds its slot gone fails, and
        the newer checkpoint takes its place.
        """
        old = [slot for slot in self.slots if slot.key and slot.key < newest_complete]
        waiting = [slot for slot in self.slots if slot.waiting]
        if all(slot.pinned for slot in old) and len(waiting) > 1:
            min(waiting, key=_age).set_pinned(False)

    def close(self, unlink: bool = False) -> None:
        for slot in self.slots:
            slot.close(unlink)
        self.slots = []


def _age(slot: SlotFile) -> SlotKey:
    assert slot.key is not None  # an unsealed one was chosen before any is compared
    return slot.key


def list_slots(folder: str | os.PathLike[str]) -> list[tuple[Path, SlotHeader]]:
    """All sealed slots of a folder, by file name; unsealed and torn ones are left out."""
    found: list[tuple[Path, SlotHeader]] = []
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        try:
            header = read_header(path)
        except SlotError:  # removed since the listing
            continue
        if header is not None:
            found.append((path, header))
    return found


def choose_folder(folder: str, overflow: str | None, need_bytes: int) -> tuple[str, str]:
    """Choose the folder for ``need_bytes`` of slots; returns it and a note ("" where it is the wanted one).

    Raises:
        SlotError: neither has room, or one cannot be looked at; the message begins with the key at fault.
    """
    free = _free(folder, "snapshot.folder")
    if free >= need_bytes:
        return folder, ""
    need = f"{need_bytes / 1e9:.3g} GB"
    seen = f"snapshot.folder: saw {free / 1e9:.3g} GB free in {folder}, expected {need} for the slots"
    if overflow is None:
        raise SlotError(f"{seen}; enlarge it, lower snapshot.slots, or set snapshot.overflow_folder")
    there = _free(overflow, "snapshot.overflow_folder")
    if there < need_bytes:
        less = f"snapshot.overflow_folder: saw {there / 1e9:.3g} GB free in {overflow}"
        raise SlotError(f"{less}, expected {need} as in {folder}; enlarge one, or lower snapshot.slots")
    return overflow, f"{seen}; using {overflow} instead (slower)"


def _free(folder: str, key: str) -> int:
    try:
        return free_bytes(folder)
    except OSError as error:
        raise SlotError(f"{key}: {folder}: {error.strerror}; create it or name another") from error
