"""Shards read from a commit: chunks fetched ahead by a few threads, each checked twice. Torch-free.

A chunk is checked against its address (blake3 of what is stored), a shard against the digest of its raw
bytes in the manifest. A fetched chunk is kept until its last planned piece is read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from picotron_ray.checkpoint.storage.base import Storage, get_bounded
from picotron_ray.checkpoint.store.chunks import chunk_key, decode
from picotron_ray.checkpoint.store.manifest import ChunkInfo, Manifest, StoredShard
from picotron_ray.checkpoint.store.shard_sources import Cutter, Piece, cut_whole
from picotron_ray.errors import CorruptError, NotFoundError

_AHEAD = 4


def fetch_chunk(storage: Storage, address: str, info: ChunkInfo) -> bytes:
    """Fetch a chunk's raw bytes; CorruptError where it is gone, damaged or of another length.

    What does not match is fetched once more, as it may have been damaged on its way.
    """
    try:
        return _fetch_once(storage, address, info)
    except CorruptError:
        return _fetch_once(storage, address, info)


def _fetch_once(storage: Storage, address: str, info: ChunkInfo) -> bytes:
    key = chunk_key(address)
    try:
        stored = get_bounded(storage, key, info.size)
    except NotFoundError as error:
        raise CorruptError(f"chunk {key} is missing from {storage.where}", where=key) from error
    if len(stored) != info.size:
        raise CorruptError(
            f"chunk {key} has {len(stored)} bytes, expected {info.size} (truncated)", where=key
        )
    return decode(address, stored, info.codec, info.raw_size)


def check_shard(stored: StoredShard, raw: bytes) -> memoryview:
    """Cut a shard's bytes out of its chunk's raw bytes; CorruptError where the digest differs."""
    part = memoryview(raw)[stored.start : stored.start + stored.shard.nbytes]
    if xxhash.xxh3_128_hexdigest(part) != stored.digest:
        key = chunk_key(stored.chunk)
        raise CorruptError(f"chunk {key}: {stored.shard.name} does not match its digest", where=key)
    return part


class CommitSource:
    """Shards of one manifest, as a ``ShardSource``."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._threads = ThreadPoolExecutor(max_workers=_AHEAD)
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._left: Counter[str] = Counter()
        self._fetched: dict[str, Future[bytes]] = {}

    def pieces(self, names: Iterable[str]) -> dict[str, list[Piece]]:
        wanted = set(names)
        return {
            name: [Piece(stored.shard, stored) for stored in parts]
            for name, parts in self._manifest.tensors().items()
            if name in wanted
        }

    def prepare(self, needed: Sequence[Piece]) -> None:
        addresses = [piece.handle.chunk for piece in needed]
        self._left = Counter(addresses)
        self._waiting = OrderedDict.fromkeys(addresses)

    def cutter(self, piece: Piece) -> Cutter:
        return cut_whole(piece, self.read(piece))

    def read(self, piece: Piece) -> memoryview:
        """The bytes of a piece; raises CorruptError."""
        stored: StoredShard = piece.handle
        self._fetch_ahead(stored.chunk)
        raw = self._fetched[stored.chunk].result()
        self._left[stored.chunk] -= 1
        if self._left[stored.chunk] <= 0:
            del self._fetched[stored.chunk]
        return check_shard(stored, raw)

    def finish(self) -> None:
        """Stop the threads; chunks are immutable, so no second check is needed."""
        self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch_ahead(self, address: str) -> None:
        if address not in self._fetched:
            self._waiting.pop(address, None)
            self._submit(address)
        while self._waiting and len(self._fetched) < _AHEAD:
            self._submit(self._waiting.popitem(last=False)[0])

    def _submit(self, address: str) -> None:
        info = self._manifest.chunks[address]
        self._fetched[address] = self._threads.submit(fetch_chunk, self._storage, address, info)
