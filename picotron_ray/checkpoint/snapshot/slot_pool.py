"""Slots of one worker: their folder, and the choice of the next one to overwrite.

A slot may be overwritten only when nothing can need it: it is unsealed, or a newer step is sealed on
*all* ranks and no upload pins it. With three slots one is always free, unless ranks drift apart by
more than a step or an upload lags; then that snapshot is skipped and counted by the caller.
"""

from __future__ import annotations

import os
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile, free_bytes
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey
from picotron_ray.checkpoint.snapshot.slot_reader import read_header
from picotron_ray.errors import SlotError

SUFFIX = ".slot"


class SlotPool:
    """The slot files of one worker, allocated at start.

    Files are named ``<worker>.<index>.slot``.
    """

    def __init__(self, folder: str | os.PathLike[str], worker: str, count: int, capacity: int) -> None:
        """Allocate ``count`` slots of ``capacity`` bytes.

        Raises:
            SlotError: they do not fit; nothing is left behind.
        """
        self.slots: list[SlotFile] = []
        try:
            for index in range(count):
                path = Path(folder) / f"{worker}.{index}{SUFFIX}"
                self.slots.append(SlotFile.create(path, capacity))
        except SlotError:
            self.close(unlink=True)
            raise

    def choose(self, newest_complete: SlotKey) -> SlotFile | None:
        """Choose the slot to write next; None where all are still needed (skip that snapshot).

        Args:
            newest_complete: ``(term, n, step)`` of the newest state that is sealed on all ranks. At
                the start of a generation that resumed from slots: the key of those slots; from a commit
                or from nothing: ``(term, n, -1)`` of the new generation.
        """
        free = [slot for slot in self.slots if slot.key is None]
        if free:
            return free[0]
        self._give_up_pin(newest_complete)
        old = [slot for slot in self.slots if slot.key and slot.key < newest_complete and not slot.pinned]
        return min(old, key=_age, default=None)

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
        SlotError: neither has room.
    """
    free = _free(folder)
    if free >= need_bytes:
        return folder, ""
    seen = f"{folder} has {free} bytes free and the snapshot slots need {need_bytes}"
    if overflow is None:
        raise SlotError(f"{seen}; enlarge it, lower snapshot.slots, or set snapshot.overflow_folder")
    if _free(overflow) < need_bytes:
        raise SlotError(f"{seen}; snapshot.overflow_folder {overflow} has {_free(overflow)} free too little")
    return overflow, f"{seen}; using {overflow} instead (slower)"


def _free(folder: str) -> int:
    try:
        return free_bytes(folder)
    except OSError as error:
        raise SlotError(f"snapshot folder {folder}: {error.strerror}; create it or name another") from error
