"""The state's way into slots beside a device whose streams are made up: copies come as late as they may."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from picotron_ray.checkpoint.snapshot import slot_file
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool, list_slots
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import StateTensor, restore
from picotron_ray.errors import NumericsError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.train import state_copies
from picotron_ray.train.snapshot import Snapshotter, SnapshotWriter
from picotron_ray.train.state_copies import DEVICE_SHARE, DeviceCopies, HostCopies

CPU = torch.device("cpu")
FIRST_KEY = (3, 7, -1)


class Event:
    """Place in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.stream: Stream | None = None
        self.at = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or MAIN[0]
        self.at = len(self.stream.work)

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.run(self.at)

    def elapsed_time(self, other: Event) -> float:
        return STALL_MS[0]


class Stream:
    """Work that is done as late as possible: when somebody waits for it."""

    lock = threading.RLock()  # of all: one waits for another, whoever runs it

    def __init__(self, device: object = None) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def add(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.work.append(work)

    def run(self, to: int) -> None:
        with self.lock:
            while self.done < to:
                self.done += 1
                self.work[self.done - 1]()

    def record_event(self) -> Event:
        event = Event()
        event.stream, event.at = self, len(self.work)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)

    def synchronize(self) -> None:
        self.run(len(self.work))


MAIN, OWN, STALL_MS = [Stream()], list[Stream](), [0.0]
INSIDE = threading.local()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Streams in the place of CUDA's; returns the one that trains."""
    MAIN[0], STALL_MS[0] = Stream(), 0.0
    OWN.clear()

    def stream_of(device: object) -> Stream:
        OWN.append(Stream())
        return OWN[-1]

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        INSIDE.stream = stream
        yield
        INSIDE.stream = None

    def start_copy(target: Tensor, source: Tensor) -> None:
        assert INSIDE.stream is OWN[0], "copies run on the stream of their own"
        target.fill_(255)
        targets = [target]  # let go with the copy
        OWN[0].add(lambda: targets.pop().copy_(source))

    cuda = SimpleNamespace(
        Stream=stream_of, Event=Event, stream=inside, current_stream=lambda device: MAIN[0]
    )
    monkeypatch.setattr(state_copies.torch, "cuda", cuda)
    monkeypatch.setattr(state_copies, "start_copy", start_copy)
    monkeypatch.setattr(state_copies, "CHUNK_BYTES", 64)
    monkeypatch.setattr(state_copies, "CHUNKS", 2)
    monkeypatch.setattr(
        state_copies, "page_locked_chunks", lambda: list(torch.empty((2, 64), dtype=torch.uint8))
    )
    monkeypatch.setattr(DeviceCopies, "_is_ours", lambda self, entry: isinstance(entry.tensor, Tensor))
    return MAIN[0]


def tensor(name: str, rows: int, columns: int) -> StateTensor:
    shape = (rows, columns)
    return StateTensor(Shard(name, "float32", shape, Box((0, 0), shape)), torch.ones(shape))


class Locks:
    """Locks pages of ``most`` slots and refuses more."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.held, self.may_lock = most, dict[int, int](), threading.Event()
        self.may_lock.set()

    def lock(self, address: int, length: int) -> bool:
        assert self.may_lock.wait(10)
        assert threading.current_thread() is not threading.main_thread(), "it would hold up the step"
        if len(self.held) == self.most:
            self.most = -1  # who asks again is told by the next assertion
            return False
        assert self.most > 0
        self.held[address] = length
        return True

    def unlock(self, address: int) -> None:
        del self.held[address]


class Taker:
    """A snapshotter over real slots, with a device's copies."""

    def __init__(self, folder: Path, timed: bool = False, locks: Locks | None = None) -> None:
        self.state = [tensor("a", 5, 9), tensor("b", 1, 3), tensor("none", 0, 4), tensor("c", 16, 4)]
        turned = StateTensor(self.state[3].shard, torch.ones(4, 16).T)  # whose bytes lie in another order
        self.state[3] = turned
        self.pool = SlotPool(folder, "w", 3, 1 << 20, locks=locks)
        self.copies = DeviceCopies(CPU)
        self.copies._exposed.on = timed
        self.copies._exposed._cuda = True
        writer = SnapshotWriter.of((3, 7), 0, Layout(), ["n1"], 16)
        self.taken = Snapshotter(
            self.pool, writer, self.state, FIRST_KEY, lambda *said: None, copies=self.copies
        )
        self.folder = folder
        self.taken.lock_pages()

    def fill(self, value: float) -> None:
        """What the optimizer does: it queues writes, which the device makes when it gets there."""
        for entry in self.state:
            assert isinstance(entry.tensor, Tensor)
            MAIN[0].add(lambda tensor=entry.tensor: tensor.fill_(value))  # type: ignore[misc]

    def stored(self, step: int) -> list[Tensor]:
        """What the slot of a step holds, digests checked."""
        (path,) = [path for path, header in list_slots(self.folder) if header.step == step]
        into = [StateTensor(e.shard, torch.zeros(e.shard.box.size)) for e in self.state]
        restore(into, SlotSource([(path.name, path)]))
        return [entry.values() for entry in into]

    def close(self) -> None:
        self.taken.close()
        self.pool.close(unlink=True)


@pytest.fixture(params=[0, 1, 99], ids=["ring", "one-locked", "all-locked"])
def taker(made_up: Stream, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Taker]:
    """Slots none, one or all of which have their pages locked."""
    locks = Locks(request.param)
    found = Taker(tmp_path, locks=locks)
    assert len(locks.held) == min(request.param, 3)
    yield found
    found.close()
    assert locks.held == {}


@pytest.fixture
def locked(made_up: Stream, tmp_path: Path) -> Iterator[Taker]:
    found = Taker(tmp_path, locks=Locks())
    yield found
    found.close()


def test_a_slot_holds_the_state_as_it_was(taker: Taker) -> None:
    """Each update is queued right after `wait_copied`, and the device is always at the end of its queue."""
    for step in (1, 2, 3):
        taker.fill(float(step))
        assert taker.taken.begin(step, [], pinned=False)
        taker.taken.wait_copied()
        taker.fill(-1.0)
        MAIN[0].synchronize()
        taker.taken.wait_sealed()
        taker.taken.observe(step)
        for found in taker.stored(step):
            assert (found == step).all()
    assert taker.taken.flush(4, [], pinned=True)
    assert all((found == -1.0).all() for found in taker.stored(4))


def test_without_the_wait_it_would_not(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: an optimizer that does not wait overwrites what is still to be copied."""
    queued = threading.Event()
    synchronize = Event.synchronize
    monkeypatch.setattr(Event, "synchronize", lambda event: (queued.wait(10), synchronize(event))[1])
    taker.fill(1.0)
    assert taker.taken.begin(1, [], pinned=False)
    taker.fill(-1.0)
    MAIN[0].run(len(MAIN[0].work))
    queued.set()
    taker.taken.wait_sealed()
    assert any((found == -1.0).any() for found in taker.stored(1))


def test_the_optimizers_stream_waits_for_the_last_copy(made_up: Stream) -> None:
    copies = DeviceCopies(CPU)
    copies._exposed.on = False
    copies.begin()
    pending: Future[None] = Future()  # its digest never comes
    with copies.reading():
        content = copies.buffers([tensor("a", 5, 9), tensor("b", 1, 3)], moving=False)
        assert callable(content)
        for body in list(content(None)):
            assert len(list(body)) in (1, 3)
        copies.follow(pending)
        (waits,) = made_up.work
        assert waits.__self__ is copies._read  # type: ignore[attr-defined]
        assert copies._read is not None
        assert copies._read.stream is OWN[0]
        assert copies._read.at == 5, "one wait for what was computed, four copies"


def test_a_step_waits_for_no_copy_where_pages_are_locked(locked: Taker) -> None:
    """Whatever the state's size: the device has copied nothing when the loop goes on; digests come later."""
    digested = []
    update = slot_file.xxhash.xxh3_128
    copied = threading.Event()
    run = Stream.run

    def late(stream: Stream, to: int) -> None:
        assert copied.wait(10) or stream is not OWN[0]
        run(stream, to)

    def digest(*data: Any) -> Any:
        digested.append(OWN[0].done)
        return update(*data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "run", late)
        patch.setattr(slot_file.xxhash, "xxh3_128", digest)
        locked.fill(1.0)
        assert locked.taken.begin(1, [], pinned=False)
        locked.taken.wait_copied()
        assert (OWN[0].done, digested) == (0, [])
        assert len(OWN[0].work) == 1 + 3, (
            "a wait for what was computed, one copy of each tensor with elements"
        )
        waits = MAIN[0].work[-1]
        assert waits.__self__ is locked.copies._read  # type: ignore[attr-defined]
        assert locked.copies._read.at == 4
        assert list_slots(locked.folder) == []
        digested.clear()  # of who looked for slots
        locked.fill(-1.0)
        copied.set()
        MAIN[0].synchronize()
        locked.taken.wait_sealed()
    assert set(digested) == {4}, "once all has come"
    assert all((found == 1.0).all() for found in locked.stored(1))
    locked.copies.begin()
    assert [times.direct for times in locked.copies.taken] == [1.0]


LEDGER = ["x" * (1 << 21)]
"""Lines that no slot has room for."""


def test_a_slot_that_has_grown_is_locked_again_behind_its_seal(made_up: Stream, tmp_path: Path) -> None:
    locks = Locks()
    locks.may_lock.clear()
    threading.Timer(0.2, locks.may_lock.set).start()
    taker = Taker(tmp_path, locks=locks)
    assert sorted(locks.held.values()) == [1 << 20] * 3, "the first step waits for them"
    assert taker.copies._chunks == [], "no ring where it is not used"
    locks.may_lock.clear()
    assert taker.taken.begin(1, LEDGER, pinned=False)
    taker.taken.wait_sealed()
    assert len(locks.held) == 2, "given back before they are unmapped"
    assert taker.taken._room.busy, "without another snapshot"
    assert not taker.taken.begin(2, [], pinned=False), "nothing waits while they are locked"
    locks.may_lock.set()
    assert taker.taken._room._locking is not None
    taker.taken._room._locking.result(10)
    assert max(locks.held.values()) > 1 << 21
    taker.close()
    assert locks.held == {}


def test_neither_a_checkpoint_nor_a_flush_nor_the_end_waits_for_a_lock(
    made_up: Stream, tmp_path: Path
) -> None:
    """They are written through the ring, into slots that are not being locked."""
    locks = Locks()
    taker = Taker(tmp_path, locks=locks)
    for slot in taker.pool.slots:
        slot._unlock_pages()
    locks.may_lock.clear()
    taker.taken._room.lock_pages()
    while not taker.pool.slots[0].locking:
        time.sleep(0.01)
    taker.fill(1.0)
    assert taker.taken.begin(1, [], pinned=True)
    taker.taken.wait_sealed()
    assert taker.taken.flush(2, [], pinned=False)
    assert [slot.key for slot in taker.pool.slots] == [None, (3, 7, 1), (3, 7, 2)]
    taker.copies.begin()
    assert {times.direct for times in taker.copies.taken} == {0.0}
    assert all((found == 1.0).all() for found in taker.stored(2))
    taker.taken.close()
    assert taker.pool.slots[0].locking, "still"
    locks.may_lock.set()
    taker.pool.close(unlink=True)  # waits for the one that is under way
    assert locks.held == {}


@pytest.mark.parametrize("left", ["refused", "short", "missing", ""])
def test_a_ring_that_may_be_used_is_made_before_the_first_step(
    left: str, made_up: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later the worker's memory is limited."""
    growing, grow = threading.Event(), SlotPool.grow

    def late(*words: Any) -> None:
        assert growing.wait(10)
        grow(*words)

    if left == "short":
        monkeypatch.setattr(SlotPool, "short", lambda pool, capacity: True)
        monkeypatch.setattr(SlotPool, "grow", late)
    if left == "missing":
        monkeypatch.setattr(SlotPool, "locked", property(lambda pool: False))
    taker = Taker(tmp_path, locks=Locks(2 if left == "refused" else 99))
    assert bool(taker.copies._chunks) == bool(left)
    growing.set()
    taker.close()


def test_a_snapshot_is_skipped_while_the_one_before_is_written(taker: Taker) -> None:
    blocked = threading.Event()
    write = taker.taken._write
    taker.taken._write = lambda *words: (write(*words), blocked.wait(10))[0]  # type: ignore[method-assign]
    assert taker.taken.begin(1, [], pinned=False)
    taker.taken.wait_copied()
    assert not taker.taken.begin(2, [], pinned=False)
    assert taker.taken.skipped == 1
    blocked.set()
    assert taker.taken.begin(3, [], pinned=True), "a checkpoint waits"


def test_a_state_that_is_not_finite_is_told_and_reaches_no_slot(taker: Taker) -> None:
    taker.fill(float("nan"))
    MAIN[0].synchronize()
    assert taker.taken.begin(1, [], pinned=False)
    with pytest.raises(NumericsError, match="NaN or infinity"):
        taker.taken.wait_sealed()
    taker.taken.wait_copied()
    assert list_slots(taker.folder) == []


def test_a_slot_that_is_kept_is_not_voided_by_a_state_that_is_not_finite(taker: Taker) -> None:
    """Where its slot would be taken; another one is written before its values are known."""
    for step in (1, 2, 3):
        taker.fill(float(step))
        assert taker.taken.begin(step, [], pinned=False)
        taker.taken.wait_sealed()
        taker.taken.observe(step)
    taker.taken.keep(1)
    (other,) = [slot for slot in taker.pool.slots if slot.key == (3, 7, 2)]
    taker.pool.slots.remove(other)
    other.close()
    taker.fill(float("nan"))
    assert taker.taken.begin(4, [], pinned=False)
    with pytest.raises(NumericsError, match="NaN or infinity"):
        taker.taken.wait_copied()
    assert {header.step for _, header in list_slots(taker.folder)} == {1, 2, 3}
    assert {slot.key for slot in taker.pool.slots} == {(3, 7, 1), (3, 7, 3)}


def test_an_optimizer_does_not_write_behind_a_state_that_is_known_to_be_bad(locked: Taker) -> None:
    locked.fill(float("nan"))
    assert locked.taken.begin(1, [], pinned=False)
    assert locked.taken._pending is not None
    assert isinstance(locked.taken._pending.exception(10), NumericsError)
    with pytest.raises(NumericsError, match="NaN or infinity"):
        locked.taken.wait_copied()
    locked.taken.wait_copied()


def test_an_error_after_the_last_copy_is_told_by_a_later_wait(taker: Taker) -> None:
    write = taker.taken._write

    def fails(*words: Any) -> None:
        write(*words)
        raise OSError("no room")

    taker.taken._write = fails  # type: ignore[method-assign]
    assert taker.taken.begin(1, [], pinned=False)
    taker.taken._copies._queued.wait(10)  # type: ignore[attr-defined]
    assert taker.taken._sealing is not None
    assert isinstance(taker.taken._sealing.exception(10), OSError)
    taker.taken._pending = None  # its wait came before the end of the writing
    with pytest.raises(OSError, match="no room"):
        taker.taken.wait_copied()
    taker.taken.wait_copied()


def test_snapshots_are_as_far_apart_as_what_they_make_steps_wait(made_up: Stream, tmp_path: Path) -> None:
    taker = Taker(tmp_path, timed=True)
    STALL_MS[0] = 3.0
    for step in (1, 2):
        assert taker.taken.begin(step, [], pinned=False)
        taker.taken.wait_copied()
        taker.taken.wait_sealed()
        taker.taken.observe(step)
    taker.copies.begin()
    assert [(times.copy_s, times.exposed_s) for times in taker.copies.taken] == [(0.003, 0.003)] * 2
    assert taker.copies._stall_s >= 0.003
    taker.copies._stall_s = 0.003  # without what the host has waited here
    assert taker.copies.apart_s(0.1) == pytest.approx(0.003 / DEVICE_SHARE)
    assert taker.copies.apart_s(1.0) == 1.0, "one ends before the next begins"
    assert HostCopies().apart_s(0.1) == 0.2, "on a CPU the copy is the cost, and half of the time may go"
    taker.close()


def test_memory_that_is_not_page_locked_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def none_left(*words: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*words, **named)

    monkeypatch.setattr(state_copies, "CHUNK_BYTES", 8)
    monkeypatch.setattr(state_copies.torch, "empty", none_left)
    with caplog.at_level(logging.WARNING):
        assert [chunk.numel() for chunk in state_copies.page_locked_chunks()] == [8] * 4
    assert "no page-locked memory" in caplog.text
    assert "out of memory" in caplog.text
