"""Slots that grow: what they hold stays, on a full file system too, and two of them are never given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot import slot_file
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool, list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import read_header, verify
from picotron_ray.errors import SlotRoomError
from picotron_ray.layout.shards import Shard, whole

MIB = 1 << 20
SHARD = Shard("w", "uint8", (100,), whole((100,)))
LARGE = Shard("w", "uint8", (2 * MIB,), whole((2 * MIB,)))


def hold(slot: SlotFile, step: int, pinned: bool = False) -> None:
    slot.write(SlotHeader(1, 1, step, 0), (SHARD,), [bytes([step]) * 100], pinned=pinned)


def content(path: Path) -> tuple[int, bytes]:
    view = verify(path)
    return view.header.step, bytes(view.raw(view.shards[0]))


class Disk:
    """A file system of ``room`` bytes, in the folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room, self.allocate = folder, 10 * MIB, slot_file._allocate
        monkeypatch.setattr(slot_file, "_allocate", self.take)

    def take(self, path: Path, descriptor: int, start: int, length: int) -> None:
        used = sum(file.stat().st_size for file in self.folder.iterdir())
        if used + start + length - path.stat().st_size > self.room:
            self.allocate(path, descriptor, start, length // 2)  # as far as it went
            raise SlotRoomError(f"{path.name} needs more")
        self.allocate(path, descriptor, start, length)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(slot_file, "GROW_BYTES", MIB)
    return Disk(tmp_path, monkeypatch)


def test_a_slot_grows_with_its_state_in_it(disk: Disk) -> None:
    slot = SlotFile.create(disk.folder / "w.0.slot", MIB)
    hold(slot, 5, pinned=True)
    slot.grow(3 * MIB + 1)
    assert slot.capacity == slot.path.stat().st_size == 3 * MIB + 4096
    assert content(slot.path) == (5, b"\5" * 100)
    assert slot.pinned
    slot.grow(2 * MIB)
    assert slot.capacity == 3 * MIB + 4096, "it never shrinks"
    slot.write(SlotHeader(1, 1, 6, 0), (LARGE,), [bytes(2 * MIB)])
    assert verify(slot.path).header.step == 6


def larger(slot: SlotFile) -> None:
    slot.write(SlotHeader(1, 1, 6, 0), (LARGE,), [bytes(2 * MIB)])


@pytest.mark.parametrize("way", [lambda slot: slot.grow(4 * MIB), larger], ids=["grow", "write"])
def test_a_full_file_system_leaves_a_growing_slot_as_it_was(
    disk: Disk, way: Callable[[SlotFile], None]
) -> None:
    slot = SlotFile.create(disk.folder / "w.0.slot", MIB)
    hold(slot, 5)
    disk.room = 2 * MIB
    with pytest.raises(SlotRoomError):
        way(slot)
    assert slot.capacity == slot.path.stat().st_size == MIB
    assert content(slot.path) == (5, b"\5" * 100)
    hold(slot, 6)
    assert content(slot.path) == (6, b"\6" * 100)


def test_growth_stops_where_it_is_told(disk: Disk) -> None:
    slot = SlotFile.create(disk.folder / "w.0.slot", MIB)
    hold(slot, 5)
    asked: list[int] = []
    slot.grow(9 * MIB, lambda: asked.append(1) or len(asked) > 2)  # type: ignore[func-returns-value]
    assert slot.capacity == 3 * MIB
    assert content(slot.path)[0] == 5


def pool_with(disk: Disk, *steps: int) -> SlotPool:
    pool = SlotPool(disk.folder, "w", 3, MIB)
    for slot, step in zip(pool.slots, steps, strict=False):
        hold(slot, step)
    return pool


def test_a_pool_grows_all_its_slots_where_there_is_room(disk: Disk) -> None:
    pool = pool_with(disk, 3, 4)
    assert not pool.short(MIB)
    assert pool.short(2 * MIB)
    pool.grow(2 * MIB, (1, 1, 4), lambda: False)
    assert [slot.capacity for slot in pool.slots] == [2 * MIB] * 3
    assert [header.step for _, header in list_slots(disk.folder)] == [3, 4]


def test_without_room_for_three_a_pool_keeps_two_and_what_is_needed(disk: Disk) -> None:
    pool = pool_with(disk, 3, 4)
    disk.room = 5 * MIB
    pool.grow(5 * MIB // 2, (1, 1, 4), lambda: False)
    assert [slot.capacity for slot in pool.slots] == [5 * MIB // 2] * 2
    assert (1, 1, 4) in [header.key for _, header in list_slots(disk.folder)]
    assert len(list(disk.folder.iterdir())) == 2
    slot = pool.choose((1, 1, 4))
    assert slot is not None
    hold(slot, 5)
    assert pool.choose((1, 1, 5)) is not slot


def test_without_room_for_two_nothing_that_is_needed_is_lost(disk: Disk) -> None:
    pool = pool_with(disk, 4, 5)
    pool.slots[1].set_pinned(True)
    disk.room = 3 * MIB
    with pytest.raises(SlotRoomError):
        pool.grow(3 * MIB, (1, 1, 4), lambda: False)
    assert [header.step for _, header in list_slots(disk.folder)] == [4, 5]
    assert read_header(pool.slots[0].path) is not None
    slot = pool.choose((1, 1, 5))
    assert slot is not None
    hold(slot, 6)
    disk.room = 10 * MIB
    pool.grow(3 * MIB, (1, 1, 5), lambda: False)
    assert {slot.capacity for slot in pool.slots} == {3 * MIB}, "tried again, with room"


def test_two_slots_stay_however_little_room_there_is(disk: Disk) -> None:
    pool = pool_with(disk)
    disk.room = 3 * MIB
    with pytest.raises(SlotRoomError):
        pool.grow(3 * MIB, (1, 1, 4), lambda: False)
    assert len(pool.slots) == len(list(disk.folder.iterdir())) == 2
    assert pool.missing == 1
    disk.room = 10 * MIB
    pool.grow(3 * MIB, (1, 1, 4), lambda: False)
    pool.fill()
    assert [slot.capacity for slot in pool.slots] == [3 * MIB] * 3


def test_growth_without_room_is_not_even_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every attempt would fill the file system to the last byte, while others write there."""
    slot = SlotFile.create(tmp_path / "w.0.slot", MIB)
    tried: list[int] = []
    monkeypatch.setattr(slot_file, "_allocate", lambda path, descriptor, start, length: tried.append(length))
    monkeypatch.setattr(slot_file, "free_bytes", lambda folder: MIB - 1)
    with pytest.raises(SlotRoomError, match="needs 2097152 bytes"):
        slot.grow(2 * MIB)
    assert tried == []
    slot.close(unlink=True)
