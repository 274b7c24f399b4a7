"""Snapshots of a rank, into slots that are made up: what is waited for, written, skipped and counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool, list_slots
from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.errors import NumericsError, SlotRoomError
from picotron_ray.layout import snapshot_shares
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.train import snapshot
from picotron_ray.train.slot_room import POLL_S
from picotron_ray.train.snapshot import Snapshotter, SnapshotWriter

LAYOUT = Layout(dp=4, pp=2)
FIRST_KEY = (3, 7, -1)


class Slot:
    """Records what is written, once it may."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.began = threading.Event()
        self.written: list[tuple[SlotHeader, tuple[Shard, ...], bool, object]] = []
        self.error: Exception | None = None
        self.known = False
        self.key, self.locked = None, False

    def holds(self, header: SlotHeader, shards: Sequence[Shard]) -> bool:
        return self.known

    def write(
        self,
        header: SlotHeader,
        shards: tuple[Shard, ...],
        data: Sequence[Any],
        *,
        pinned: bool,
        check: Callable[[], None],
        on_phase: object,
    ) -> None:
        self.began.set()
        assert self.may_end.wait(10)
        if self.error:
            raise self.error
        self.data = list(data)
        assert len(shards) == len(self.data)
        check()
        self.written.append((header, shards, pinned, on_phase))


class Slots:
    """Gives its slot, after it has refused ``busy`` times."""

    def __init__(self) -> None:
        self.slot, self.busy, self.asked = Slot(), 0, list[tuple[int, int, int]]()
        self.lacking, self.grown = False, list[int]()
        self.room, self.may_grow = True, threading.Event()
        self.missing = 0
        self.unlocked, self.lock_order = False, list[str]()

    def lock_pages(self, stopped: Callable[[], bool]) -> None:
        self.lock_order.append("lock" if not stopped() else "stopped")
        self.unlocked = False

    def short(self, capacity: int) -> bool:
        return self.lacking

    def grow(self, capacity: int, newest: tuple[int, int, int], stopped: Any) -> None:
        self.grown.append(capacity)
        assert self.may_grow.wait(10)
        if not self.room:
            raise SlotRoomError("no room")
        self.lacking = False

    def holding(self, key: tuple[int, int, int]) -> None:
        return None

    def fill(self) -> None:
        self.missing -= 1

    def choose(self, newest: tuple[int, int, int], generation: tuple[int, int], kept: Any) -> Slot | None:
        self.kept = kept
        assert generation == FIRST_KEY[:2]
        self.asked.append(newest)
        self.busy -= 1
        return self.slot if self.busy < 0 else None


def tensor(name: str, rows: int, primary: bool = True) -> StateTensor:
    return StateTensor(Shard(name, "float32", (rows,), Box((0,), (rows,))), torch.zeros(rows), primary)


STATE = [tensor("a", 4), tensor("b", 2, primary=False), tensor("c", 4)]


class Taker:
    """A snapshotter of one of ``count`` replicas on a node, and what it has said."""

    def __init__(self, count: int, lacking: bool = False) -> None:
        self.sealed: list[tuple[int, bool]] = []
        self.slots = Slots()
        self.slots.lacking = lacking
        nodes = ["n1", "n2"] if count == 1 else ["n1", "n1"]
        writer = SnapshotWriter.of((3, 7), 5, LAYOUT, nodes * 4, 16)
        self.taken = Snapshotter(
            self.slots,  # type: ignore[arg-type]
            writer,
            STATE,
            FIRST_KEY,
            lambda step, pinned, seconds: self.sealed.append((step, pinned)),
            self.heard,
        )

    def heard(self, phase: str) -> None:
        raise AssertionError("the slots here have no phases")

    @property
    def written(self) -> list[Any]:
        return self.slots.slot.written


@pytest.fixture
def alone() -> Iterator[Taker]:
    found = Taker(4)
    yield found
    found.slots.slot.may_end.set()
    found.taken.close()


def test_the_place_of_a_rank_among_replicas_of_its_node() -> None:
    nodes = ["n1", "n2", "n1", "n1", "n1", "n1", "n2", "n1"]  # 4 to 7 hold the same
    found = SnapshotWriter.of((3, 7), 7, LAYOUT, nodes, 16)
    assert found == SnapshotWriter(3, 7, 7, LAYOUT, 16, LAYOUT.state_group(7), 2, 3)
    assert SnapshotWriter.of((3, 7), 6, LAYOUT, nodes, 16).count == 1
    assert LAYOUT.state_group(7) == LAYOUT.state_group(4) != LAYOUT.state_group(3)


def test_slots_that_had_no_room_are_made_beside_the_training(alone: Taker) -> None:
    alone.slots.missing = 1
    for step in (9, 10):
        assert alone.taken.begin(step, [], pinned=False)
        alone.taken.wait_copied()
    assert (alone.slots.missing, len(alone.written)) == (0, 2)


def test_a_snapshot_holds_this_members_share(alone: Taker) -> None:
    taken = alone.taken
    assert taken.sealed_step == -1
    assert taken.begin(9, ["a line"], pinned=False)
    taken.wait_copied()
    ((header, shards, pinned, on_phase),) = alone.written
    group = LAYOUT.state_group(5)
    assert header == SlotHeader(
        term=3,
        n=7,
        step=9,
        rank=5,
        fragments=((group, 1, 4),),
        layout=LAYOUT.to_dict(),
        cursor=144,
        ledger=("a line",),
    )
    assert [(shard.name, shard.box) for shard in shards] == [("a", Box((2,), (2,)))]
    assert not pinned
    assert on_phase == alone.heard
    assert alone.sealed == [(9, False)]
    assert taken.sealed_step == 9
    assert taken.skipped == 0
    assert alone.slots.asked == [FIRST_KEY]


def test_what_is_still_is_copied_once_into_each_slot() -> None:
    still = [replace(tensor, still=True) for tensor in STATE[:1]]
    slots = Slots()
    writer = SnapshotWriter.of((3, 7), 5, LAYOUT, ["n1", "n2"] * 4, 16)
    taken = Snapshotter(slots, writer, [*still, *STATE[1:]], FIRST_KEY, lambda *said: None)  # type: ignore[arg-type]
    for known in (False, True):
        slots.slot.known = known
        assert taken.begin(9 + known, [], pinned=False)
        taken.wait_copied()
        assert [buffer is None for buffer in slots.slot.data][:1] == [known]
        assert all(buffer is not None for buffer in slots.slot.data[1:])
    taken.close()


def test_what_is_sealed_everywhere_may_be_written_over(alone: Taker) -> None:
    for sealed, newest in ((-1, -1), (0, 0), (4, 4), (3, 4)):
        alone.taken.observe(sealed)
        alone.taken.begin(9, [], pinned=False)
        assert alone.slots.asked[-1] == (3, 7, newest)


def test_without_a_free_slot_a_snapshot_is_skipped(alone: Taker) -> None:
    alone.slots.busy = 1
    assert not alone.taken.begin(9, [], pinned=True)
    assert alone.taken.skipped == 1
    assert alone.taken._pending is None
    assert alone.taken.begin(10, [], pinned=True)
    assert alone.taken.skipped == 1


@pytest.mark.parametrize("way", ["begin", "flush", "wait_copied"])
def test_the_copy_under_way_is_waited_for(alone: Taker, way: str) -> None:
    taken, slot = alone.taken, alone.slots.slot
    slot.may_end.clear()
    taken.begin(9, [], pinned=False)
    assert slot.began.wait(5)
    ways = {
        "begin": lambda: taken.begin(10, [], pinned=False),
        "flush": lambda: taken.flush(10, [], pinned=False),
        "wait_copied": taken.wait_copied,
    }
    ended: list[int] = []

    def go() -> None:
        ways[way]()
        ended.append(taken.sealed_step)

    waiting = threading.Thread(target=go, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert alone.slots.asked == [FIRST_KEY], "no slot is chosen while one is written"
    slot.may_end.set()
    waiting.join(5)
    assert ended
    assert taken.waited_s > 0.04
    assert taken.pinned_wait_s == 0.0, "it was no checkpoint"
    assert len(alone.slots.asked) == (1 if way == "wait_copied" else 2)


def test_the_wait_for_a_checkpoint_is_kept_apart(alone: Taker) -> None:
    alone.slots.slot.may_end.clear()
    alone.taken.begin(9, [], pinned=True)
    threading.Timer(0.05, alone.slots.slot.may_end.set).start()
    alone.taken.wait_copied()
    assert alone.taken.pinned_wait_s == alone.taken.waited_s > 0.03
    waited = alone.taken.waited_s
    alone.taken.wait_copied()
    assert alone.taken.waited_s == waited
    alone.slots.slot.error = OSError("no room")
    alone.taken.begin(10, [], pinned=False)
    with pytest.raises(OSError, match="no room"):
        alone.taken.wait_copied()
    assert alone.taken.sealed_step == 9


def test_a_flush_holds_everything(alone: Taker) -> None:
    taken = alone.taken
    assert taken.begin(9, [], pinned=False)
    assert taken.flush(9, ["z"], pinned=False), "a share is not enough"
    header, shards, pinned, _ = alone.written[1]
    assert header.fragments == ((LAYOUT.state_group(5), 0, 1),)
    assert (header.step, header.ledger, pinned) == (9, ("z",), False)
    assert [shard.name for shard in shards] == ["a", "c"], "what other ranks hold too is theirs"
    assert taken.flush(9, [], pinned=False)
    assert len(alone.written) == 2, "it is there already"
    assert taken.flush(9, [], pinned=True)
    assert alone.written[2][2] is True
    assert taken.flush(10, [], pinned=False)
    assert len(alone.written) == 4
    assert alone.sealed == [(9, False), (9, False), (9, True), (10, False)]


def test_a_large_state_is_flushed_with_the_next_replicas_share(
    alone: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_shares, "WHOLE_BYTES", 0)
    taken, group = alone.taken, LAYOUT.state_group(5)
    assert taken.flush(9, ["z"], pinned=False)
    header, shards, _, _ = alone.written[0]
    assert header.fragments == ((group, 1, 4), (group, 2, 4))
    assert [(shard.name, shard.box) for shard in shards] == [("a", Box((2,), (2,))), ("c", Box((0,), (2,)))]
    assert taken.flush(9, [], pinned=False)
    assert len(alone.written) == 1, "it is there already"


def test_a_flush_without_room_holds_its_own_share_at_least(
    alone: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, slot, write = alone.taken, alone.slots.slot, alone.slots.slot.write

    def small(header: SlotHeader, shards: tuple[Shard, ...], data: Any, **rest: Any) -> None:
        if len(shards) > 1:
            raise SlotRoomError("no room")
        write(header, shards, data, **rest)

    monkeypatch.setattr(slot, "write", small)
    assert taken.flush(9, [], pinned=True)
    assert [header.fragments for header, *_ in alone.written] == [((LAYOUT.state_group(5), 1, 4),)]
    slot.error = SlotRoomError("none at all")
    assert not taken.flush(10, [], pinned=False)
    assert taken.skipped == 1
    with pytest.raises(SlotRoomError, match="none at all"):
        taken.flush(10, [], pinned=True)


def test_a_flush_takes_the_slot_of_its_own_share_where_a_dying_rank_left_no_other(tmp_path: Path) -> None:
    """It died while it copied step 2: 1 is the newest state that all have sealed, and 3 the live one."""
    writer = SnapshotWriter.of((3, 7), 5, LAYOUT, ["n1"] * 8, 16)
    pool = SlotPool(tmp_path, "w", 3, 1 << 20)
    taken = Snapshotter(pool, writer, STATE, FIRST_KEY, lambda *_: None)
    for step in (1, 2, 3):
        assert taken.begin(step, [], pinned=False)
        taken.wait_copied()
        taken.observe(min(step, 1))
    assert {header.step for _, header in list_slots(tmp_path)} == {1, 2, 3}
    assert taken.flush(3, [], pinned=False)
    sealed = {header.step: header for _, header in list_slots(tmp_path)}
    assert sealed.keys() == {1, 2, 3}
    assert sealed[3].fragments != sealed[2].fragments, "the dead one's share is in it"
    taken.close()
    pool.close(unlink=True)


def test_a_state_that_is_not_finite_voids_no_slot(tmp_path: Path) -> None:
    writer = SnapshotWriter.of((3, 7), 0, Layout(), ["n1"], 16)
    pool, state = SlotPool(tmp_path, "w", 2, 1 << 20), [tensor("a", 4)]
    taken = Snapshotter(pool, writer, state, FIRST_KEY, lambda *_: None)
    for step in (1, 2):
        assert taken.begin(step, [], pinned=False)
        taken.wait_copied()
        taken.observe(step)
    taken.keep(1)
    assert isinstance(state[0].tensor, torch.Tensor)
    state[0].tensor[1] = float("nan")
    assert taken.begin(3, [], pinned=False)
    with pytest.raises(NumericsError):
        taken.wait_copied()
    with pytest.raises(NumericsError):
        taken.flush(3, [], pinned=True)
    assert {header.step for _, header in list_slots(tmp_path)} == {1, 2}
    taken.close()
    pool.close(unlink=True)


def test_slots_grow_beside_the_steps() -> None:
    """Until they are large enough nothing waits for them but a checkpoint."""
    found = Taker(4, lacking=True)
    taken, slots = found.taken, found.slots
    began = time.monotonic()
    assert not taken.begin(1, [], pinned=False)
    assert time.monotonic() - began < 1
    assert (taken.skipped, slots.grown, slots.asked) == (1, [taken._room._capacity], [])
    threading.Timer(0.05, slots.may_grow.set).start()
    assert taken.begin(2, [], pinned=True)
    taken.wait_copied()
    assert [header.step for header, *_ in found.written] == [2]
    assert taken.begin(3, [], pinned=False)
    taken.close()
    assert slots.grown == [taken._room._capacity], "once"


def test_waiting_for_slots_to_grow_is_a_phase_of_its_own_and_moves_with_them() -> None:
    """As part of the optimizer's it would count as a hang, where a state is large."""
    found = Taker(4, lacking=True)
    told: list[str] = []

    def grow(capacity: int, newest: tuple[int, int, int], stopped: Any) -> None:
        assert found.slots.may_grow.wait(10)
        for _ in range(4):
            stopped()
            time.sleep(2 * POLL_S)

    @contextmanager
    def growth() -> Iterator[Callable[[], None]]:
        told.append("grow")
        found.slots.may_grow.set()
        yield lambda: told.append("moved")
        told.append("before")

    found.slots.grow = grow  # type: ignore[method-assign]
    found.taken._room._growth = growth
    found.taken._room.grow()  # as a new generation does
    assert not found.taken.begin(1, [], pinned=False)
    assert told == [], "nothing waits"
    assert found.taken.begin(2, [], pinned=True)
    assert told[0] == "grow"
    assert told[1:].count("moved") >= 2
    assert told[-1] == "before"
    found.taken.close()


def test_who_is_called_away_grows_no_further() -> None:
    found = Taker(4, lacking=True)
    stopped: list[bool] = []

    def grow(capacity: int, newest: tuple[int, int, int], asked: Any) -> None:
        while not asked():
            time.sleep(0.01)
        stopped.append(asked())

    found.slots.grow = grow  # type: ignore[method-assign]
    found.taken._room.grow()  # the first one, as a new generation does
    found.slots.may_grow.set()
    found.taken.stop_waiting()
    found.taken.flush(3, [], pinned=False)
    assert stopped == [True]
    found.taken.close()


def test_without_room_to_grow_steps_go_on_and_it_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    found = Taker(4, lacking=True)
    taken, slots = found.taken, found.slots
    slots.room, slots.slot.error = False, SlotRoomError("slot w.0 needs more")
    slots.may_grow.set()
    for step in range(1, 9):
        taken.begin(step, [], pinned=True)
        taken.wait_copied()
    assert (taken.skipped, len(slots.grown), found.written) == (8, 8, [])
    assert [record.getMessage() for record in caplog.records] == [
        "rank 5 skips snapshots that do not fit: no room"
    ]
    slots.room, slots.slot.error = True, None
    assert taken.begin(9, [], pinned=True)
    taken.close()
    assert [header.step for header, *_ in found.written] == [9]


def test_the_only_replica_of_a_node_needs_no_flush() -> None:
    found = Taker(1)
    one = Snapshotter(
        found.slots,  # type: ignore[arg-type]
        SnapshotWriter.of((3, 7), 0, Layout(), ["n1"], 16),
        STATE,
        FIRST_KEY,
        lambda *_: None,
    )
    one.begin(9, [], pinned=False)
    assert one.flush(9, [], pinned=False)
    assert len(found.written) == 1
    one.close()
    assert one._executor._shutdown
    assert (one._whole, one._share, one._pending) == ([], [], None)
    found.taken.close()


def test_a_flush_waits_for_no_slot_once_its_member_is_to_leave(alone: Taker) -> None:
    alone.slots.busy = 1 << 30
    threading.Timer(0.05, alone.taken.stop_waiting).start()
    began = time.monotonic()
    assert not alone.taken.flush(9, [], pinned=True)
    assert 0.04 < time.monotonic() - began < 5


def test_a_flush_waits_for_a_slot_where_it_must(alone: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(snapshot.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(snapshot.time, "sleep", sleep)
    alone.slots.busy = 1
    assert not alone.taken.flush(9, [], pinned=False)
    assert (now[0], alone.taken.skipped) == (100.0, 1)
    alone.slots.busy = 3
    assert alone.taken.flush(9, [], pinned=True)
    assert now[0] == pytest.approx(100.03)
    alone.slots.busy = 10**6
    assert not alone.taken.flush(10, [], pinned=True)
    assert now[0] == pytest.approx(130.03, abs=0.02)
    assert alone.taken.skipped == 2


def test_the_end_waits_for_the_copy_under_way(alone: Taker) -> None:
    alone.slots.slot.may_end.clear()
    alone.taken.begin(9, [], pinned=False)
    assert alone.slots.slot.began.wait(5)
    threading.Timer(0.05, alone.slots.slot.may_end.set).start()
    alone.taken.close()
    assert alone.taken.sealed_step == 9


def test_the_cost_is_smoothed(alone: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 20.0, 27.0])
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: next(times))
    header = alone.taken._header(4, [], (0,))
    for expected in (2.0, 0.8 * 2.0 + 0.2 * 7.0):
        alone.taken._write(alone.slots.slot, header, STATE, False)  # type: ignore[arg-type]
        assert alone.taken.cost_s == pytest.approx(expected)
