"""Small checkpoints for tests, without torch: a state, its slots in any layout, uploads, commits."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.commit import Committed, commit
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.manifest import Manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard, region, whole

SHAPES = {"embed.weight": (23, 8), "layers.0.mlp.down.weight": (8, 12), "norm.weight": (8,), "scalar": ()}
CUT = {"embed.weight": 0, "layers.0.mlp.down.weight": 1}
State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Held:
    shard: Shard
    tensor: np.ndarray
    primary: bool


def make_state(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> State:
    draw = np.random.default_rng(seed)
    return {
        prefix + name: draw.normal(size=shape)
        for prefix in ("", "exp_avg/")
        for name, shape in shapes.items()
    }


def _span(n: int, parts: int, index: int) -> tuple[int, int]:
    return n * index // parts, n * (index + 1) // parts


def held(state: State, layout: Layout, rank: int) -> list[Held]:
    """What one rank of a (dp, tp) layout with ZeRO holds."""
    at = layout.coordinates(rank)
    result = []
    for name, array in state.items():
        axis = CUT.get(name.rpartition("/")[2])
        offset, size = [0] * array.ndim, list(array.shape)
        if axis is not None:
            low, high = _span(size[axis], layout.tp, at.tp)
            offset[axis], size[axis] = low, high - low
        if size:
            low, high = _span(size[0], layout.dp, at.dp)
            offset[0], size[0] = offset[0] + low, high - low
        box = Box(tuple(offset), tuple(size))
        part = np.array(array[region(box, whole(array.shape))], order="C")
        primary = (axis is not None or at.tp == 0) and (bool(size) or at.dp == 0)
        result.append(Held(Shard(name, "float64", array.shape, box), part, primary))
    return result


def ledger(first: int, last: int) -> tuple[str, ...]:
    return tuple(json.dumps({"step": step, "loss": 1 / step}) for step in range(first, last + 1))


def write_slots(
    folder: Path,
    state: State,
    layout: Layout,
    key: tuple[int, int, int],
    lines: tuple[str, ...] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Seal the state at ``key`` (term, n, step) as the slots of all ranks of the layout."""
    paths = []
    for rank in range(layout.world_size):
        mine = [entry for entry in held(state, layout, rank) if entry.primary and entry.shard.box.numel]
        shards = tuple(entry.shard for entry in mine)
        name = "-".join(map(str, (*key, rank)))
        slot = SlotFile.create(folder / f"w{name}.slot", slot_bytes(shards))
        header = SlotHeader(
            *key,
            rank=rank,
            fragments=((layout.state_group(rank), 0, 1),),
            layout=layout.to_dict(),
            cursor=key[2] * 8,
            ledger=(ledger(1, key[2]) if lines is None else lines) if rank == 0 else (),
            extra={"updates": key[2], **(extra or {})},
        )
        slot.write(
            header, shards, [np.ascontiguousarray(entry.tensor).reshape(-1).view(np.uint8) for entry in mine]
        )
        slot.close()
        paths.append(slot.path)
    return paths


LAYOUT = Layout(dp=2, tp=2, zero=3)


def upload(
    storage: Storage,
    folder: Path,
    state: State,
    key: tuple[int, int, int],
    layout: Layout = LAYOUT,
    nodes: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> list[UploadPart]:
    """Slots spread over nodes, each uploaded by its own call."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_slots(folder, state, layout, key, extra=extra)
    return [upload_slots(paths[node::nodes], storage, *key, owner=f"node{node}") for node in range(nodes)]


def generation(term: int, n: int, step: int = 0, parent: tuple[int, int] | None = None) -> dict[str, object]:
    source = {
        "kind": "slots" if parent else "init",
        "step": step,
        "generation": {"term": parent[0], "n": parent[1]} if parent else None,
    }
    return {"term": term, "n": n, "members": [], "layout": {}, "reason": "test", "source": source}


def save(
    storage: Storage,
    log: RunLog,
    folder: Path,
    state: State,
    key: tuple[int, int, int],
    layout: Layout = LAYOUT,
    extra: Mapping[str, Any] | None = None,
) -> Committed:
    """Upload and commit; the generation's entry is added where it has none."""
    known = {(e.body["term"], e.body["n"]) for e in log.entries() if e.kind == "generation"}
    if key[:2] not in known:
        log.append("generation", generation(*key[:2]))
    return commit(storage, log, upload(storage, folder, state, key, layout, extra=extra))


def load(storage: Storage, manifest: Manifest) -> State:
    """The whole state of a manifest."""
    source = CommitSource(storage, manifest)
    names = list(manifest.tensors())
    state: State = {}
    pieces = source.pieces(names)
    source.prepare(list(itertools.chain.from_iterable(pieces.values())))
    for name, parts in pieces.items():
        state[name] = np.empty(parts[0].shard.global_shape)
        for piece in parts:
            box = piece.shard.box
            data = np.frombuffer(source.read(piece), dtype=np.float64).reshape(box.size)
            state[name][region(box, whole(state[name].shape))] = data
    source.finish()
    return state


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def memory_folder() -> Iterator[Path]:
    """A temporary folder in memory, where every fsync of the store is free (the disk's are not)."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="picotron-test-", dir=base)
    yield Path(folder)
    for _ in range(20):  # a store's collector may still be at it
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.1)
