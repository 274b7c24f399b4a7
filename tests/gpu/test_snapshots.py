"""Snapshots of a CUDA device's state: into slots whose pages are registered, and through the ring."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from picotron_ray.checkpoint.snapshot.slot_file import Place
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool, list_slots
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import StateTensor, restore
from picotron_ray.errors import NumericsError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.train.page_locks import CudaPageLocks, page_locks
from picotron_ray.train.snapshot import Snapshotter, SnapshotWriter
from picotron_ray.train.state_copies import DeviceCopies

CUDA = torch.device("cuda", 0)
ROWS, MIB = 4096, 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def tensor(name: str, columns: int, turned: bool = False) -> StateTensor:
    shape = (ROWS, columns)
    values = torch.ones(columns, ROWS, device=CUDA).T if turned else torch.ones(shape, device=CUDA)
    return StateTensor(Shard(name, "float32", shape, Box((0, 0), shape)), values)


class Taker:
    """A snapshotter of 272 MiB on the device, more than the ring holds."""

    def __init__(self, folder: Path, locked: bool) -> None:
        self.folder = folder
        self.state = [tensor("a", 8192), tensor("b", 8192), tensor("turned", 1024, turned=True)]
        locks = page_locks(CUDA, folder) if locked else None
        self.pool = SlotPool(folder, "w", 2, 320 * MIB, locks=locks)
        self.copies = DeviceCopies(CUDA)
        writer = SnapshotWriter.of((1, 1), 0, Layout(), ["n"], 16)
        self.taken = Snapshotter(
            self.pool, writer, self.state, (1, 1, -1), lambda *said: None, copies=self.copies
        )
        self.taken.lock_pages()
        assert all(slot.locked == locked for slot in self.pool.slots)

    def fill(self, value: float) -> None:
        for entry in self.state:
            assert isinstance(entry.tensor, torch.Tensor)
            entry.tensor.fill_(value)

    def stored(self, step: int) -> list[torch.Tensor]:
        (path,) = [path for path, header in list_slots(self.folder) if header.step == step]
        into = [StateTensor(e.shard, torch.zeros(e.shard.box.size)) for e in self.state]
        restore(into, SlotSource([(path.name, path)]))
        return [entry.values() for entry in into]

    def close(self) -> None:
        self.taken.close()
        self.pool.close(unlink=True)


@pytest.mark.parametrize("locked", [True, False], ids=["registered", "ring"])
def test_a_slot_holds_the_state_as_it_was(folder: Path, locked: bool) -> None:
    taker = Taker(folder, locked)
    for step in (1, 2, 3):
        torch.cuda._sleep(50_000_000)  # the update is late
        taker.fill(float(step))
        assert taker.taken.begin(step, [], pinned=False)
        taker.taken.wait_copied()
        taker.fill(-1.0)
        taker.taken.wait_sealed()
        taker.taken.observe(step)
        assert all((found == step).all() for found in taker.stored(step))
    taker.copies.begin()
    assert {times.direct for times in taker.copies.taken} == {float(locked)}
    taker.close()
    assert list(folder.iterdir()) == []


def test_the_host_waits_for_no_copy(folder: Path) -> None:
    """The device has not begun to copy when the loop goes on: it is busy with what was queued before."""
    taker = Taker(folder, locked=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    taker.fill(2.0)
    busy = torch.cuda.Event()
    busy.record()
    assert taker.taken.begin(1, [], pinned=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        taker.taken.wait_copied()
        taker.fill(-1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "nothing was waited for"
    taker.taken.wait_sealed()
    assert all((found == 2.0).all() for found in taker.stored(1))
    taker.close()


def test_a_value_that_is_not_finite_is_found_though_the_next_update_hides_it(folder: Path) -> None:
    taker = Taker(folder, locked=True)
    taker.state[1].tensor[77, 5] = float("nan")  # type: ignore[index]
    assert taker.taken.begin(1, [], pinned=False)
    taker.taken.wait_copied()
    taker.fill(1.0)
    with pytest.raises(NumericsError, match=r"^b after step 1"):
        taker.taken.wait_sealed()
    assert list_slots(folder) == []
    taker.close()


def mapped(folder: Path, size: int) -> np.memmap:  # type: ignore[type-arg]
    path = folder / "file"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))


def address(place: Place) -> int:
    return int(place.__array_interface__["data"][0])


def test_registered_pages_are_page_locked_until_they_are_given_back(folder: Path) -> None:
    locks, place = CudaPageLocks(CUDA), mapped(folder, 8 * MIB)
    here = torch.from_numpy(place)
    assert not here.is_pinned()
    assert locks.lock(address(place), place.nbytes)
    assert torch.from_numpy(place).is_pinned()
    here.copy_(torch.full((place.nbytes,), 7, dtype=torch.uint8, device=CUDA), non_blocking=True)
    torch.cuda.synchronize()
    assert (np.fromfile(folder / "file", dtype=np.uint8) == 7).all(), "another reader of the file sees it"
    locks.unlock(address(place))
    assert not torch.from_numpy(place).is_pinned()


def test_a_refusal_is_said_and_harms_no_later_kernel(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    locks, place = CudaPageLocks(CUDA), mapped(folder, MIB)
    assert locks.lock(address(place), place.nbytes)
    with caplog.at_level(logging.WARNING):
        assert not locks.lock(address(place), place.nbytes), "it is registered already"
    assert "registers no memory for snapshots" in caplog.text
    assert float((torch.ones(3, device=CUDA) + 1).sum()) == 6.0
    locks.unlock(address(place))
    locks.unlock(address(place))
    assert "does not give back" in caplog.text
    assert float((torch.ones(3, device=CUDA) + 1).sum()) == 6.0
