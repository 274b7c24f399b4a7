"""Restore from slots of another node: whatever the size, little more memory than the state itself."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from picotron_ray.checkpoint.shard_service.client import RemoteSlot, ShardClient
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile, free_bytes
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import StateTensor, buffers, restore
from picotron_ray.errors import SlotUnreachableError
from picotron_ray.layout.shards import Box, Shard, whole
from tests.support.checkpoint.slot_service import serving

MIB = 1 << 20
SHM = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = SHM / f"picotron-test-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def peak_bytes() -> int:
    """Most memory of this process since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def state_of(rows: int, box: Box) -> list[StateTensor]:
    """One tensor of ``rows`` MiB and a small one beside it."""
    shape = (rows, MIB // 4)
    return [
        StateTensor(Shard("w", "float32", shape, box), torch.empty(box.size)),
        StateTensor(Shard("norm", "float32", (3,), whole((3,))), torch.zeros(3)),
    ]


def restore_far(folder: Path, mib: int) -> int:
    """Restore a slot of one tensor from another process, whole and a column; returns the extra bytes."""
    writer = state_of(mib, whole((mib, MIB // 4)))
    for row in range(mib):
        writer[0].tensor[row] = row  # type: ignore[index]
    shards = [entry.shard for entry in writer]
    slot = SlotFile.create(folder / "w.0.slot", slot_bytes(shards))
    slot.write(SlotHeader(1, 1, 5, 0), shards, buffers(writer))
    slot.close()
    wanted = writer
    wanted[0].tensor.fill_(-1.0)  # type: ignore[union-attr]
    column = state_of(mib, Box((0, 7), (mib, 1)))
    with serving(folder) as (endpoint, _), closing(ShardClient(lambda: endpoint, 30.0)) as peer:
        forget_peak()
        before = peak_bytes()
        restore(wanted, SlotSource([("w.0.slot", RemoteSlot(peer, "w.0.slot", (1, 1, 5)))]))
        extra = peak_bytes() - before
        restore(column, SlotSource([("w.0.slot", RemoteSlot(peer, "w.0.slot", (1, 1, 5)))]))
    rows = torch.arange(mib, dtype=torch.float32)
    for part in (wanted[0].tensor[:, 0], wanted[0].tensor[:, -1], column[0].tensor[:, 0]):  # type: ignore[index]
        assert torch.equal(part, rows)  # type: ignore[arg-type]
    return extra


def test_a_restore_from_another_node_takes_a_few_frames_of_memory(folder: Path) -> None:
    extra = restore_far(folder, 160)
    assert extra <= 64 * MIB, f"{extra / MIB:.0f} MiB beside a slot of 160 MiB"


@pytest.mark.deep
def test_a_slot_of_2_gib_takes_no_more(folder: Path) -> None:
    if free_bytes(SHM) < 2.2 * 2**30:
        pytest.skip(f"{SHM} has no room for a slot of 2 GiB")
    extra = restore_far(folder, 2048)
    print(f"{extra / MIB:.0f} MiB of memory beside a slot of 2 GiB")
    assert extra <= 256 * MIB


def test_a_service_that_freezes_in_the_middle_is_given_up(folder: Path) -> None:
    writer = state_of(40, whole((40, MIB // 4)))
    shards = [entry.shard for entry in writer]
    slot = SlotFile.create(folder / "w.0.slot", slot_bytes(shards))
    slot.write(SlotHeader(1, 1, 5, 0), shards, buffers(writer))
    slot.close()
    with serving(folder) as (endpoint, pid), closing(ShardClient(lambda: endpoint, 0.5)) as peer:
        far = RemoteSlot(peer, "w.0.slot", (1, 1, 5))
        boxes = far.boxes(far.shards[0], far.shards[0].shard.box)
        next(boxes)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(SlotUnreachableError, match=r"within 0\.5 s"):
            list(boxes)
        assert time.monotonic() - began < 3
