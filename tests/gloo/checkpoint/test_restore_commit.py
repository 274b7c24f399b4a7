"""Restore from a commit into any layout, and the copy to device memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.manifest import load_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.shard_sources import Cutter, Piece, cut_whole
from picotron_ray.checkpoint.torch_state import StateTensor, _copy, copy_to_device, restore
from picotron_ray.errors import CorruptError, StorageError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from tests.support.checkpoint.checkpoint_kit import LAYOUT, held, make_state, save


def blank(state: dict[str, np.ndarray], layout: Layout, rank: int) -> list[StateTensor]:
    return [
        StateTensor(
            entry.shard, torch.full(entry.shard.box.size, float("nan"), dtype=torch.float64), entry.primary
        )
        for entry in held(state, layout, rank)
    ]


@pytest.mark.parametrize(
    "after",
    [Layout(), Layout(dp=3, zero=3), Layout(tp=4), Layout(dp=2, tp=3, zero=2), Layout(dp=2, cp=2, zero=2)],
)
def test_any_layout_from_a_commit(tmp_path: Path, after: Layout) -> None:
    storage = LocalStorage(str(tmp_path / "runs"), "r1")
    log = RunLog(storage)
    log.claim_term("test")
    state = make_state(1)
    done = save(storage, log, tmp_path / "s", state, (1, 1, 5), LAYOUT)
    manifest = load_manifest(storage, done.manifest, done.digest)
    for rank in range(after.world_size):
        tensors = blank(state, after, rank)
        restore(tensors, CommitSource(storage, manifest))
        for tensor, want in zip(tensors, held(state, after, rank), strict=True):
            assert np.array_equal(tensor.tensor.numpy(), want.tensor), want.shard


def test_damaged_and_missing_chunks_are_named(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "runs"), "r1")
    log = RunLog(storage)
    log.claim_term("test")
    state = make_state(1)
    done = save(storage, log, tmp_path / "s", state, (1, 1, 5), LAYOUT)
    manifest = load_manifest(storage, done.manifest, done.digest)
    key = next(iter(storage.list("chunks/"))).key
    data = bytearray(storage.get(key))
    data[100] ^= 1
    storage.put(key, bytes(data))
    with pytest.raises(CorruptError, match="do not match their address") as caught:
        restore(blank(state, Layout(), 0), CommitSource(storage, manifest))
    assert caught.value.where == key
    storage.delete(key)
    with pytest.raises(CorruptError, match="is missing"):
        restore(blank(state, Layout(), 0), CommitSource(storage, manifest))
    with pytest.raises(StorageError, match="no tensor other"):
        restore(blank({"other": np.zeros(3)}, Layout(), 0), CommitSource(storage, manifest))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (5,), (4, 6)])
def test_copy_to_device_keeps_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The path of device memory, taken on CPU: from a read-only, strided source."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    wanted = torch.randn(shape).mul(10).to(dtype)
    raw = wanted.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elements = np.frombuffer(raw, dtype=f"u{wanted.element_size()}").reshape(shape)
    if len(shape) == 2:
        elements, wanted = elements[1:, 2:], wanted[1:, 2:]
    target = torch.zeros(wanted.shape, dtype=dtype)
    copy_to_device(target.view(bits[target.element_size()]), elements)
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8"])
def test_every_dtype_is_copied_bit_for_bit(dtype: str) -> None:
    wanted = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    bits = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}[wanted.element_size()]
    raw = np.frombuffer(wanted.view(torch.uint8).numpy().tobytes(), bits).reshape(2, 3)
    target = torch.zeros_like(wanted)
    _copy(target, raw)
    assert torch.equal(target, wanted)


def test_a_part_is_taken_from_every_piece_that_has_some_of_it() -> None:
    """Rows 1 to 5 of pieces of rows 0 to 2 and 3 to 5: read in order, each once, and then finished."""
    whole = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    pieces = [Piece(shard(first), whole[first : first + 3]) for first in (3, 0)]
    told: list[object] = []

    class Source:
        def pieces(self, names: dict[str, object]) -> dict[str, list[Piece]]:
            return dict.fromkeys(names, pieces)

        def prepare(self, needed: list[Piece]) -> None:
            told.append(needed)

        def cutter(self, piece: Piece) -> Cutter:
            told.append(piece)
            return cut_whole(piece, piece.handle.contiguous().view(torch.uint8).reshape(-1).numpy().data)

        def finish(self) -> None:
            told.append("finished")

    boxes = [Box((1, 0), (4, 2)), Box((0, 1), (6, 1)), Box((0, 0), (0, 2))]
    state = [
        StateTensor(Shard("w", "float32", (6, 2), box), torch.full(box.size, float("nan"))) for box in boxes
    ]
    restore(state, Source())
    assert torch.equal(state[0].tensor, whole[1:5])  # type: ignore[arg-type]
    assert torch.equal(state[1].tensor, whole[:, 1:])  # type: ignore[arg-type]
    assert told == [pieces, *pieces, "finished"]


def shard(first: int) -> Shard:
    return Shard("w", "float32", (6, 2), Box((first, 0), (3, 2)))
