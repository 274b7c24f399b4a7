"""Slots whose pages a device writes: locked while they are mapped, given back before they go."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.snapshot.slot_file import Place, SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import MAGIC, SlotHeader
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool, list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import verify
from picotron_ray.errors import SlotError
from picotron_ray.layout.shards import Shard, whole

MIB = 1 << 20
SHARDS = tuple(
    Shard(name, "uint8", (size,), whole((size,))) for name, size in (("a", 100), ("none", 0), ("b", 7))
)


class Locks:
    """Says what it was asked, and that memory is there whenever it is."""

    def __init__(self, folder: Path, refuses: int = -1) -> None:
        self.folder, self.refuses = folder, refuses
        self.held: dict[int, int] = {}
        self.asked = 0
        self.files: list[int] = []  # in the folder, at each that is given back

    def lock(self, address: int, length: int) -> bool:
        assert ctypes.string_at(address, len(MAGIC)) == MAGIC
        assert address % 4096 == length % 4096 == 0
        self.asked += 1
        if self.asked == self.refuses:
            return False
        self.held[address] = length
        return True

    def unlock(self, address: int) -> None:
        assert ctypes.string_at(address, len(MAGIC)) == MAGIC, "it is mapped still"
        ctypes.string_at(address, self.held.pop(address))
        self.files.append(len(list(self.folder.iterdir())))


def pool_of(folder: Path, locks: Locks) -> SlotPool:
    found = SlotPool(folder, "w", 3, MIB, locks=locks)
    assert found.unlocked
    found.lock_pages(lambda: False)
    return found


def test_pages_are_given_back_before_the_slot_is_removed(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    pool = pool_of(tmp_path, locks)
    assert (len(locks.held), pool.locked, pool.unlocked) == (3, True, False)
    pool.missing = 1
    assert (pool.locked, pool.unlocked) == (False, False), "one that is made later is not locked"
    pool.missing = 0
    pool.lock_pages(lambda: False)
    assert locks.asked == 3, "once a slot"
    pool.close(unlink=True)
    assert locks.held == {}
    assert locks.files == [3, 2, 1]


def test_pages_are_given_back_before_a_slot_is_mapped_anew(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    pool = pool_of(tmp_path, locks)
    pool.grow(2 * MIB, (0, 0, 0), lambda: False)
    assert locks.held == {}
    assert pool.unlocked
    pool.lock_pages(lambda: False)
    assert list(locks.held.values()) == [2 * MIB] * 3
    pool.close(unlink=True)


def test_after_a_refusal_no_more_are_asked_for(tmp_path: Path) -> None:
    locks = Locks(tmp_path, refuses=2)
    pool = pool_of(tmp_path, locks)
    assert [slot.locked for slot in pool.slots] == [True, False, False]
    assert not pool.unlocked, "no one asks again"
    pool.lock_pages(lambda: False)
    assert locks.asked == 2
    pool.close(unlink=True)
    assert locks.held == {}


def test_locking_stops_where_it_is_told(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    pool = SlotPool(tmp_path, "w", 3, MIB, locks=locks)
    pool.lock_pages(lambda: len(locks.held) == 2)
    assert len(locks.held) == 2
    assert pool.unlocked
    pool.close(unlink=True)


def test_a_slot_neither_grows_nor_goes_while_it_is_being_locked(tmp_path: Path) -> None:
    """It would be mapped anew, or not at all, behind the driver's back."""
    locks = Locks(tmp_path)
    pool = SlotPool(tmp_path, "w", 2, MIB, locks=locks)
    slot, lock = pool.slots[0], locks.lock
    began, may_end = threading.Event(), threading.Event()

    def slowly(address: int, length: int) -> bool:
        began.set()
        assert may_end.wait(10)
        return lock(address, length)

    locks.lock = slowly  # type: ignore[method-assign]
    locking = threading.Thread(target=pool.lock_pages, args=(lambda: bool(locks.held),), daemon=True)
    locking.start()
    assert began.wait(10)
    assert (slot.locking, slot.locked) == (True, False)
    assert pool.choose((0, 0, 0)) is pool.slots[1], "another one is written"
    growing = threading.Thread(target=slot.grow, args=(2 * MIB,), daemon=True)
    growing.start()
    growing.join(0.1)
    assert growing.is_alive()
    may_end.set()
    locking.join(10)
    growing.join(10)
    assert (locks.held, slot.locked, slot.capacity) == ({}, False, 2 * MIB)
    pool.close(unlink=True)
    assert slot.lock_pages(locks), "and no other one is refused for one that is gone"
    assert locks.held == {}


def header(step: int) -> SlotHeader:
    return SlotHeader(1, 1, step, 0)


def test_what_is_written_in_place_is_digested_where_it_lies(tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "w.0.slot", MIB)
    assert slot.lock_pages(Locks(tmp_path))

    def content(places: Sequence[Place] | None) -> Iterator[Any]:
        assert places is not None
        assert [len(place) for place in places] == [100, 0, 7]
        assert slot.key is None, "it is unsealed before anything is written"
        places[0][:] = 1
        yield places[0]
        yield b""
        yield iter([places[2][:3], bytes([3] * 4)])  # and what comes in parts, from there or elsewhere

    slot.write(header(3), SHARDS, content)
    view = verify(slot.path)
    assert bytes(view.raw(view.shards[0])) == bytes([1] * 100)
    assert bytes(view.raw(view.shards[2]))[3:] == bytes([3] * 4)
    slot.close(unlink=True)


def test_without_locked_pages_no_place_is_given(tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "w.0.slot", MIB)
    seen: list[Any] = []
    slot.write(header(3), SHARDS, lambda places: seen.append(places) or [bytes(100), b"", bytes(7)])  # type: ignore[func-returns-value]
    assert seen == [None]
    slot.close(unlink=True)


def test_what_is_refused_before_the_seal_stays_unsealed(tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "w.0.slot", MIB)

    def refuse() -> None:
        raise SlotError("not this one")

    with pytest.raises(SlotError, match="not this"):
        slot.write(header(3), SHARDS, [bytes(100), b"", bytes(7)], check=refuse)
    assert list_slots(tmp_path) == []
    assert slot.key is None
    slot.close(unlink=True)


def test_a_slot_goes_though_a_traceback_holds_a_view_of_it(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    slot = SlotFile.create(tmp_path / "w.0.slot", MIB)
    assert slot.lock_pages(locks)
    held: list[Any] = []
    slot.write(header(3), SHARDS, lambda places: held.append(places) or [bytes(100), b"", bytes(7)])  # type: ignore[func-returns-value]
    slot.close(unlink=True)
    assert locks.held == {}
    assert list(tmp_path.iterdir()) == []
