"""Restore from slots: any layout into any layout, bit for bit, and nothing damaged gets through."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import pytest
import torch

from picotron_ray.checkpoint.snapshot.replica_split import split_for_replica
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_reader import open_slot
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import StateTensor, buffers, dtype_name, restore
from picotron_ray.errors import CorruptError, StorageError
from picotron_ray.layout.shards import Box, Shard, region

SHAPES = {
    "embed.weight": (23, 8),
    "layers.0.attention.wq.weight": (8, 8),
    "layers.0.mlp.down.weight": (8, 12),
    "norm.weight": (8,),
    "scalar": (),
}
CUT = {"embed.weight": 0, "layers.0.attention.wq.weight": 0, "layers.0.mlp.down.weight": 1}


def full_state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix + name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for prefix in ("", "exp_avg/", "exp_avg_sq/")
        for name, shape in SHAPES.items()
    }


def cut(n: int, parts: int, index: int) -> tuple[int, int]:
    return n * index // parts, n * (index + 1) // parts


def local(state: dict[str, torch.Tensor], tp: int, dp: int, tp_at: int, dp_at: int) -> list[StateTensor]:
    """One rank's part: tp cuts a tensor's own dimension, dp cuts rows of what remains (ZeRO)."""
    held = []
    for name, tensor in state.items():
        dim = CUT.get(name.rpartition("/")[2])
        offset, size = [0] * tensor.dim(), list(tensor.shape)
        if dim is not None:
            low, high = cut(size[dim], tp, tp_at)
            offset[dim], size[dim] = low, high - low
        if size:
            low, high = cut(size[0], dp, dp_at)
            offset[0], size[0] = offset[0] + low, high - low
        box, whole = Box(tuple(offset), tuple(size)), Box((0,) * tensor.dim(), tuple(tensor.shape))
        part = tensor[region(box, whole)].clone()
        primary = dim is not None or tp_at == 0
        primary = primary and (bool(size) or dp_at == 0)
        held.append(
            StateTensor(Shard(name, dtype_name(tensor.dtype), tuple(tensor.shape), box), part, primary)
        )
    return held


def write_slots(folder: Path, state: dict[str, torch.Tensor], tp: int, dp: int, step: int = 5) -> list[Path]:
    paths = []
    for rank, (tp_at, dp_at) in enumerate(itertools.product(range(tp), range(dp))):
        mine = split_for_replica(local(state, tp, dp, tp_at, dp_at), 0, 1)
        shards = tuple(entry.shard for entry in mine)
        slot = SlotFile.create(folder / f"{tp}x{dp}-{rank}.{step}.slot", slot_bytes(shards))
        slot.write(SlotHeader(1, 1, step, rank), shards, buffers(mine))
        slot.close()
        paths.append(slot.path)
    return paths


def source(paths: list[Path]) -> SlotSource:
    return SlotSource([(path.name, path) for path in paths])


def blank(held: list[StateTensor]) -> list[StateTensor]:
    for entry in held:
        entry.tensor.fill_(float("nan"))
    return held


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("after", [(1, 1), (4, 1), (1, 4), (2, 3)])
def test_any_layout_into_any_layout(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], dtype: torch.dtype
) -> None:
    state = full_state(1, dtype)
    slots = source(write_slots(tmp_path, state, *before))
    for tp_at, dp_at in itertools.product(range(after[0]), range(after[1])):
        expected = local(state, *after, tp_at, dp_at)
        held = blank(local(state, *after, tp_at, dp_at))
        restore(held, slots)
        for have, want in zip(held, expected, strict=True):
            assert torch.equal(have.tensor, want.tensor), have.shard


def test_replicas_share_the_copying(tmp_path: Path) -> None:
    """Three replicas of one state group write a third each; together they restore all of it."""
    state = full_state(2)
    paths = []
    for index in range(3):
        mine = split_for_replica(local(state, 1, 1, 0, 0), index, 3)
        shards = tuple(entry.shard for entry in mine)
        slot = SlotFile.create(tmp_path / f"w{index}.0.slot", slot_bytes(shards))
        slot.write(SlotHeader(1, 1, 5, index, fragments=((0, index, 3),)), shards, buffers(mine))
        paths.append(slot.path)
    held = blank(local(state, 1, 1, 0, 0))
    restore(held, source(paths))
    assert all(torch.equal(entry.tensor, state[entry.shard.name]) for entry in held)
    with pytest.raises(StorageError, match="has no tensor"):
        restore(blank(local(state, 1, 1, 0, 0)), source(paths[:2]))
    halves = write_slots(tmp_path, state, 2, 1)
    with pytest.raises(StorageError, match=r"covers only part of embed\.weight: \(12, 8\) at \(11, 0\)"):
        restore(blank(local(state, 1, 1, 0, 0)), source(halves[:1]))


def test_flipped_bits_never_restore(tmp_path: Path) -> None:
    """200 single bits flipped in slot bodies: all refused, the slot is named, or not needed by the rank."""
    state = full_state(3)
    paths = write_slots(tmp_path, state, 2, 2)
    clean = [path.read_bytes() for path in paths]
    draw = random.Random(7)
    refused = 0
    for _ in range(200):
        number = draw.randrange(len(paths))
        entry = draw.choice(open_slot(clean[number]).shards)
        bad = bytearray(clean[number])
        bad[entry.offset + draw.randrange(entry.shard.nbytes)] ^= 1 << draw.randrange(8)
        data = [bytes(bad) if i == number else good for i, good in enumerate(clean)]
        held = blank(local(state, 1, 1, 0, 0))
        with pytest.raises(CorruptError) as caught:
            restore(held, SlotSource([(f"slot{i}", part) for i, part in enumerate(data)]))
        assert caught.value.where == f"slot{number}"
        refused += 1
    assert refused == 200


def test_slots_of_two_steps_are_never_mixed(tmp_path: Path) -> None:
    first = write_slots(tmp_path, full_state(1), 2, 1, step=5)
    second = write_slots(tmp_path, full_state(1), 2, 1, step=6)
    with pytest.raises(CorruptError, match="never mixed"):
        source([first[0], second[1]])
    header = open_slot(second[0]).header
    one = [("slot", second[0])]
    assert SlotSource(one, header.key).views[0].header.step == 6
    with pytest.raises(CorruptError, match="expected"):
        SlotSource(one, (header.term, header.n, 5))  # its file was used again since it was chosen


def test_another_model_or_precision_is_refused(tmp_path: Path) -> None:
    state = full_state(1)
    slots = source(write_slots(tmp_path, state, 1, 1))
    shard = Shard("embed.weight", "float64", (23, 8), Box((0, 0), (23, 8)))
    with pytest.raises(StorageError, match=r"embed\.weight: stored as float32.*expected float64"):
        restore([StateTensor(shard, torch.zeros(23, 8, dtype=torch.float64))], slots)
    shard = Shard("head.weight", "float32", (2,), Box((0,), (2,)))
    with pytest.raises(StorageError, match=r"no tensor head\.weight"):
        restore([StateTensor(shard, torch.zeros(2))], slots)


def test_overwritten_while_reading_is_noticed(tmp_path: Path) -> None:
    state = full_state(1)
    mine = local(state, 1, 1, 0, 0)
    shards = tuple(entry.shard for entry in mine)
    slot = SlotFile.create(tmp_path / "w.0.slot", slot_bytes(shards))
    slot.write(SlotHeader(1, 1, 5, 0), shards, buffers(mine))
    slots = source([slot.path])
    slot.write(SlotHeader(1, 1, 6, 0), shards, buffers(mine))
    with pytest.raises(CorruptError, match="overwritten while"):
        restore(mine, slots)


def snapshot_and_restore_s(folder: Path, tensors: int) -> tuple[float, float]:
    """The least CPU seconds of five that a snapshot of ``tensors`` tensors and a restore of it take."""
    state = {f"t{i}": torch.randn(64, 96) for i in range(tensors)}
    CUT.update(dict.fromkeys(state, 0))
    paths: list[Path] = []
    restores, snapshots = [], []
    try:
        paths += write_slots(folder, state, 2, 2, step=os.getpid())
        for _ in range(5):
            held = local(state, 2, 1, 0, 0)
            began = time.process_time()
            restore(held, source(paths))
            restores.append(time.process_time() - began)
        mine = split_for_replica(held, 0, 1)
        shards = tuple(entry.shard for entry in mine)
        slot = SlotFile.create(folder / f"cost-{os.getpid()}.slot", slot_bytes(shards))
        paths.append(slot.path)
        for step in range(5):
            began = time.process_time()
            slot.write(SlotHeader(1, 1, step, 0), shards, buffers(mine))
            snapshots.append(time.process_time() - began)
    finally:
        for name in state:
            CUT.pop(name, None)
        for path in paths:
            path.unlink(missing_ok=True)
    return min(snapshots), min(restores)


def test_cost_of_a_snapshot_and_of_a_restore_grows_with_the_tensors(tmp_path: Path) -> None:
    """Eight times the tensors (and their moments) take some eight times as long, not sixty-four."""
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    few, many = (snapshot_and_restore_s(folder, tensors) for tensors in (60, 480))
    assert (many[0] / few[0] < 24, many[1] / few[1] < 24) == (True, True), (few, many)
