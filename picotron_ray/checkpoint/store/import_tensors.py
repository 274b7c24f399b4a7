"""Commit of whole tensors as a run's step 0, for imports from other formats. Torch-free.

One tensor is in memory at a time, and a pack of small ones. The result is a commit like any other, of weights
alone: restored into any layout, verified and collected by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.absent import CondemnedReader
from picotron_ray.checkpoint.store.assembly import put_fresh
from picotron_ray.checkpoint.store.chunks import PACK_BYTES, SMALL_BYTES, cells
from picotron_ray.checkpoint.store.import_commit import ORIGIN, WEIGHTS_ONLY
from picotron_ray.checkpoint.store.manifest import ChunkInfo, Manifest, StoredShard, check
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.shard_sources import Piece
from picotron_ray.checkpoint.store.upload import Pack, store_pack
from picotron_ray.errors import StorageError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Shard, whole


class _Arrays:
    """Source of pieces that hold their own arrays."""

    @staticmethod
    def read(piece: Piece) -> memoryview:
        array: np.ndarray[Any, Any] = piece.handle
        return array.reshape(-1).view(np.uint8).data


@dataclass
class TensorWriter:
    """Writer of whole tensors: packs them into chunks, and keeps what a manifest says of them."""

    storage: Storage
    codec: str

    def __post_init__(self) -> None:
        self.shards: list[StoredShard] = []
        self.chunks: dict[str, ChunkInfo] = {}
        self._absent, _ = CondemnedReader().look(self.storage)
        self._small: Pack = []

    def add(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Put one tensor; small ones wait until a chunk is full."""
        array = np.ascontiguousarray(array)
        dtype = str(array.dtype)
        piece = Piece(Shard(name, dtype, array.shape, whole(array.shape)), array)
        for cell in cells(array.shape, dtype):
            shard = Shard(name, dtype, array.shape, cell)
            if shard.nbytes >= SMALL_BYTES:
                self._put([(shard, [piece])])
                continue
            if sum(waiting.nbytes for waiting, _ in self._small) + shard.nbytes > PACK_BYTES:
                self.flush()
            self._small.append((shard, [piece]))

    def flush(self) -> None:
        """Put the tensors that still wait."""
        if self._small:
            self._put(self._small)
            self._small = []

    def _put(self, pack: Pack) -> None:
        address, info, shards, _ = store_pack(self.storage, _Arrays(), pack, self.codec, self._absent)
        self.chunks[address] = info
        self.shards += shards


def commit_tensors(
    storage: Storage,
    tensors: Iterable[tuple[str, np.ndarray[Any, Any]]],
    origin: dict[str, Any],
    *,
    generation: Callable[[int], dict[str, Any]],
    owner: str,
    codec: str,
) -> str:
    """Commit tensors as step 0 of a run that has no commit; returns the manifest's key.

    Args:
        origin: where they come from, kept in the manifest.
        generation: the log entry's body of generation (term, 0), given the term.

    Raises:
        StorageError: the run has commits already, or the storage refused.
    """
    log = RunLog(storage)
    log.refresh()
    if log.commits():
        raise StorageError(f"{storage.where} has commits already; choose another name")
    term = log.claim_term(owner)
    writer = TensorWriter(storage, codec)
    for name, array in tensors:
        writer.add(name, array)
    writer.flush()
    manifest = Manifest(
        step=0,
        term=term,
        n=0,
        cursor=0,
        layout=Layout().to_dict(),
        shards=tuple(writer.shards),
        chunks=writer.chunks,
        extra={ORIGIN: origin, WEIGHTS_ONLY: True},
    )
    problems = check(manifest)
    if problems:
        raise StorageError(f"what was imported is incomplete: {problems[0]}")
    encoded = manifest.encode()
    key = put_fresh(storage, manifest.key, encoded)
    log.append("generation", generation(term))
    digest = blake3(encoded).hexdigest()
    log.append("commit", {"term": term, "n": 0, "step": 0, "manifest": key, "digest": digest})
    return key
