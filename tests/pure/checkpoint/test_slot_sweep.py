"""Slots of dead workers make room: 100 kills in a row at an exactly sized file system, and the 101st."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot import slot_file
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX, SlotPool, list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import set_pinned
from picotron_ray.checkpoint.snapshot.slot_sweep import owner, sweep
from picotron_ray.errors import SlotRoomError
from picotron_ray.layout.shards import Box, Shard

SHARD = Shard("w", "float32", (4,), Box((0,), (4,)))
BODY = b"all of the state"
SLOTS, WORKERS = 3, 2


@pytest.fixture
def exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with room for the slots of two workers, and not for one more."""

    def allocate(path: Path, descriptor: int, start: int, length: int) -> None:
        if len(list(path.parent.glob("*.slot"))) > SLOTS * WORKERS:
            raise SlotRoomError("no room")

    real = slot_file._allocate
    monkeypatch.setattr(slot_file, "_allocate", lambda *place: (allocate(*place), real(*place)))
    return tmp_path


def pool_of(folder: Path, worker: str) -> SlotPool:
    return SlotPool(folder, worker, SLOTS, slot_bytes([SHARD]), room_follows=True)


def write(pool: SlotPool, newest: SlotKey, n: int, step: int, pinned: bool = False) -> SlotFile | None:
    pool.fill()  # as the snapshotter does
    slot = pool.choose(newest)
    if slot is not None:
        slot.write(SlotHeader(1, n, step, 0), [SHARD], [BODY], pinned=pinned)
    return slot


@pytest.mark.parametrize("at_once", [False, True], ids=["replaced later", "replaced at once"])
def test_100_kills_in_a_row_leave_room_for_the_101st(exact: Path, at_once: bool) -> None:
    survivor, victim = pool_of(exact, "s"), pool_of(exact, "v0")
    complete: SlotKey = (1, 1, -1)
    step = 0
    for kill in range(1, 102):
        for _ in range(4):  # steps of the generation in which the victim dies
            step += 1
            written = [write(pool, complete, kill, step) for pool in (survivor, victim)]
            if None not in written:
                complete = (1, kill, step)
            sweep(exact.glob(f"*{SUFFIX}"), {"s", owner(victim.slots[0].path)}, complete)
        assert complete == (1, kill, step), f"kill {kill}: the last snapshot was skipped"
        assert len(victim.slots) == SLOTS
        half = victim.choose(complete)
        assert half is not None
        half.unseal()
        victim.close()
        source = complete  # the survivor's slot holds this state; what the dead one has of it may be needed
        assert sweep(exact.glob(f"*{SUFFIX}"), {"s"}, source), "the half written one goes at least"
        if not at_once:
            step += 1
            write(survivor, source, kill + 1, step)
            complete = (1, kill + 1, step)
            sweep(exact.glob(f"*{SUFFIX}"), {"s"}, complete)
            assert {owner(path) for path, _ in list_slots(exact)} == {"s"}
        victim = pool_of(exact, f"v{kill}")
        assert step in [header.step for _, header in list_slots(exact)]
    survivor.close()
    victim.close()


def test_what_may_be_needed_stays(tmp_path: Path) -> None:
    names = {}
    for index, (n, step, pinned) in enumerate([(1, 4, False), (1, 5, False), (1, 3, True), (2, 1, False)]):
        slot = SlotFile.create(tmp_path / f"dead.{index}.slot", slot_bytes([SHARD]))
        slot.write(SlotHeader(1, n, step, 0), [SHARD], [BODY], pinned=pinned)
        names[n, step] = slot.path.name
        slot.close()
    SlotFile.create(tmp_path / "dead.9.slot", 1).close()
    SlotFile.create(tmp_path / "alive.0.slot", 1).close()
    assert sweep(tmp_path.glob(f"*{SUFFIX}"), {"alive"}, None) == ["dead.9.slot"], (
        "what is sealed may be all there is"
    )
    assert sweep(tmp_path.glob(f"*{SUFFIX}"), {"alive"}, (1, 1, 5), kept=[names[1, 4]]) == []
    assert sweep(tmp_path.glob(f"*{SUFFIX}"), {"alive"}, (1, 1, 5)) == [names[1, 4]]
    assert sweep(tmp_path.glob(f"*{SUFFIX}"), {"alive"}, (1, 2, 1)) == [names[1, 5]]
    set_pinned(tmp_path / names[1, 3], False)
    assert sweep(tmp_path.glob(f"*{SUFFIX}"), {"alive"}, (1, 2, 1)) == [names[1, 3]]
    assert [path.name for path, _ in list_slots(tmp_path)] == [names[2, 1]]
    assert (tmp_path / "alive.0.slot").exists()
