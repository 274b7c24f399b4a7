"""Upload of a node's sealed slots as chunks. Torch-free.

Order of a save, which garbage collection relies on (``gc.py``): an intent is put, and renewed from then on
(``intents.py``), before the first look at what is there already. It names the condemned lists that the save
goes by: their chunks, and those in quarantine, count as absent and are put again. When all are there the
intent is replaced by one that lists them. The coordinator then assembles the manifest from all nodes' parts,
checks that every chunk is there, and commits (``commit.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from blake3 import blake3

from picotron_ray.checkpoint.snapshot.ledger_spill import split_marker
from picotron_ray.checkpoint.snapshot.slot_reader import holds
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store import condemned
from picotron_ray.checkpoint.store.absent import AbsentChunks
from picotron_ray.checkpoint.store.chunks import PACK_BYTES, SMALL_BYTES, address_of, cells, chunk_key, encode
from picotron_ray.checkpoint.store.intents import Intents, StateKey
from picotron_ray.checkpoint.store.manifest import ChunkInfo, StoredShard
from picotron_ray.checkpoint.store.shard_sources import Piece, SlotSource
from picotron_ray.checkpoint.store.spilled_segments import stored_segments
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.errors import CorruptError, PicotronError, SlotReusedError
from picotron_ray.layout.shards import Shard, as_elements, copy_common, element_type, uncovered

_THREADS = 4


def upload_slots(
    paths: Sequence[str | os.PathLike[str]],
    storage: Storage,
    term: int,
    n: int,
    step: int,
    *,
    owner: str,
    codec: str = "none",
    intents: Intents | None = None,
    spilled: Path | None = None,
) -> UploadPart:
    """Put the state in one node's sealed slots into the store; returns the node's part of the manifest.

    Args:
        paths: slots of generation (term, n) at ``step``; keep them pinned until this returns.
        owner: unique per node; it names the intent, with the slots: a node may upload others of the state.
        spilled: folder of what was spilled of ledgers.
        intents: renew the intent after this has returned, until the state is settled; None: nobody does.

    Raises:
        CorruptError: a slot is damaged.
        SlotReusedError: a slot's file holds another state by now, or is being overwritten.
        StorageError: the storage refused or was unavailable; calling again later is safe.
    """
    names = "/".join(os.path.basename(path) for path in paths)
    key = f"intents/{step}-{term}-{n}-{owner}-{blake3(names.encode()).hexdigest()[:8]}.json"
    renewed = intents or Intents(storage)
    try:
        part = _upload(paths, storage, (term, n, step), key, codec, renewed)
        part = _with_spilled(storage, part, spilled)
    except PicotronError as error:
        renewed.drop(key)
        if isinstance(error, CorruptError):  # unless what was read is another state's
            _check_not_reused(paths, (term, n, step))
        raise
    if intents is None:
        renewed.drop(key)
    return part


def _check_not_reused(paths: Sequence[str | os.PathLike[str]], state: StateKey) -> None:
    for path in paths:
        if not holds(path, state):
            name = os.path.basename(path)
            raise SlotReusedError(
                f"slot {name} holds state {state} no more; a newer one takes its place", name
            )


def _upload(
    paths: Sequence[str | os.PathLike[str]],
    storage: Storage,
    state: StateKey,
    intent: str,
    codec: str,
    intents: Intents,
) -> UploadPart:
    term, n, step = state
    _check_not_reused(paths, state)
    source = SlotSource([(os.path.basename(path), path) for path in paths])
    promised = [entry.key for entry in storage.list(condemned.PREFIX)]
    intents.put(intent, state, None, obeyed=promised)  # in one go, so that no collection sees less
    begun_s = next((entry.mtime_s for entry in storage.list(intent)), 0.0)
    absent, obeyed = intents.condemned.look(storage)
    if not obeyed.issuperset(promised):  # one of them cannot be read
        begun_s = 0.0
        intents.put(intent, state, None, obeyed=obeyed)
    with ThreadPoolExecutor(max_workers=_THREADS) as threads:
        packs = threads.map(lambda pack: store_pack(storage, source, pack, codec, absent), _packs(source))
        stored = list(packs)
    source.finish()
    chunks = {address: info for address, info, _, _ in stored}
    intents.put(intent, state, list(chunks))
    head = source.views[0].header
    return UploadPart(
        intent=intent,
        term=term,
        n=n,
        step=step,
        cursor=head.cursor,
        layout=head.layout,
        fragments=tuple(sorted({f for view in source.views for f in view.header.fragments})),
        shards=tuple(shard for _, _, shards, _ in stored for shard in shards),
        chunks=chunks,
        ledger=max((view.header.ledger for view in source.views), key=len),
        extra=head.extra,
        written_bytes=sum(info.size for _, info, _, fresh in stored if fresh),
        reused=tuple(sorted(address for address, _, _, fresh in stored if not fresh)),
        again=tuple(sorted(address for address, _, _, fresh in stored if fresh and address in absent)),
        begun_s=begun_s,
    )


def _with_spilled(storage: Storage, part: UploadPart, folder: Path | None) -> UploadPart:
    """Store what was spilled of a part's ledger, as far back as it is needed and can be had."""
    spilled, lines = split_marker(part.ledger)
    segments = stored_segments(storage, spilled, folder)
    return replace(part, ledger=tuple(lines), segments=tuple(segments))


Pack = list[tuple[Shard, list[Piece]]]


def _packs(source: SlotSource) -> Iterator[Pack]:
    """Group shards into chunks, each shard with the slot pieces that it is made of."""
    names = sorted({entry.shard.name for view in source.views for entry in view.shards})
    pack: Pack = []
    packed = 0
    for shard, pieces in (cell for name in names for cell in _cells(source.pieces([name])[name])):
        if shard.nbytes >= SMALL_BYTES:
            yield [(shard, pieces)]
            continue
        if packed + shard.nbytes > PACK_BYTES:
            yield pack
            pack, packed = [], 0
        pack.append((shard, pieces))
        packed += shard.nbytes
    if pack:
        yield pack


def _cells(pieces: list[Piece]) -> Iterator[tuple[Shard, list[Piece]]]:
    """Yield grid cells that the pieces cover wholly, and of the others the parts that are there."""
    like = pieces[0].shard
    for cell in cells(like.global_shape, like.dtype):
        touching = [(p, common) for p in pieces if (common := cell.intersect(p.shard.box)) is not None]
        if touching and not uncovered(cell, [common for _, common in touching]):
            yield Shard(like.name, like.dtype, like.global_shape, cell), [p for p, _ in touching]
        else:
            for piece, common in touching:
                yield Shard(like.name, like.dtype, like.global_shape, common), [piece]


class Reader(Protocol):
    """Hands out the bytes of pieces."""

    def read(self, piece: Piece) -> memoryview: ...


def store_pack(
    storage: Storage, source: Reader, pack: Pack, codec: str, absent: AbsentChunks
) -> tuple[str, ChunkInfo, list[StoredShard], bool]:
    """Put one chunk unless it is there; returns its address, sizes, shards, and whether it was put."""
    raw = np.empty(sum(shard.nbytes for shard, _ in pack), dtype=np.uint8)
    placed, at = [], 0
    for shard, pieces in pack:
        target = raw[at : at + shard.nbytes]
        elements = target.view(element_type(shard.dtype)).reshape(shard.box.size)
        for piece in pieces:
            copy_common(elements, shard.box, as_elements(source.read(piece), piece.shard), piece.shard.box)
        placed.append((shard, at, xxhash.xxh3_128_hexdigest(target.data)))
        at += shard.nbytes
    stored = encode(raw.data, codec)
    address = address_of(stored)
    fresh = _put_chunk(storage, address, stored, absent)
    shards = [StoredShard(shard, address, start, digest) for shard, start, digest in placed]
    return address, ChunkInfo(len(stored), raw.nbytes, codec), shards, fresh


def _put_chunk(storage: Storage, address: str, stored: bytes, absent: AbsentChunks) -> bool:
    key = chunk_key(address)
    if address not in absent and storage.size(key) == len(stored):
        return False
    storage.put(key, stored)
    if address in absent:
        storage.delete(f"quarantine/chunks/{address}")
    return True
