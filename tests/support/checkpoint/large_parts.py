"""Upload parts of a state of many chunks, and a storage in memory that counts its calls; no tensors."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from picotron_ray.checkpoint.storage.base import StoredObject
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.manifest import ChunkInfo, StoredShard
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.errors import AlreadyExistsError, NotFoundError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard

ROWS = 8


def address(at: int, step: int = 1) -> str:
    return f"{at * 0x9E3779B97F4A7C15 % (1 << 64):016x}{step:048x}"


def large_part(
    chunks: int,
    step: int = 1,
    *,
    reused: Sequence[int] = (),
    begun_s: float = 0.0,
    known: int = 0,
    cells: int = 500,
) -> UploadPart:
    """One part that is all of a state, in no order: tensors of ``cells`` chunks of 8 rows each.

    Args:
        reused: numbers of chunks that were in the store; they have the addresses of step 1.
        known: step of the parent: the part's ledger begins after it.
    """
    shards, infos, old = [], {}, set(reused)
    for at in range(chunks):
        tensor, row = divmod(at, cells)
        rows = min(cells, chunks - cells * tensor) * ROWS
        shard = Shard(f"layer.{tensor}", "float32", (rows, 4), Box((row * ROWS, 0), (ROWS, 4)))
        name = address(at, 1 if at in old else step)
        shards.append(StoredShard(shard, name, 0, f"{at:032x}"))
        infos[name] = ChunkInfo(shard.nbytes, shard.nbytes)
    random.Random(chunks).shuffle(shards)
    return UploadPart(
        intent=f"intents/{step}",
        term=1,
        n=1,
        step=step,
        cursor=step,
        layout=Layout(dp=1).to_dict(),
        fragments=((0, 0, 1),),
        shards=tuple(shards),
        chunks=infos,
        ledger=tuple(json.dumps({"step": at}) for at in range(known + 1, step + 1)),
        extra={},
        reused=tuple(sorted(address(at) for at in old)),
        begun_s=begun_s,
    )


class CountedStorage:
    """Objects in memory. ``calls`` counts by method; a listing counts one per 1,000 objects."""

    where = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.now_s = 1000.0  # of the last put; each takes 10 ms
        self._times: dict[str, float] = {}

    def hold(self, part: UploadPart) -> None:
        """Put a part's chunks, at no call."""
        self.objects.update({chunk_key(a): bytes(info.size) for a, info in part.chunks.items()})

    def put(self, key: str, data: bytes) -> None:
        self.calls["put"] += 1
        self.now_s += 0.01
        self._times[key] = self.now_s
        self.objects[key] = data

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.calls["put"] += 1
        if self.objects.setdefault(key, data) != data:
            raise AlreadyExistsError(key)

    def get(self, key: str) -> bytes:
        return self.get_range(key, 0, 1 << 40)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.calls["get"] += 1
        if key not in self.objects:
            raise NotFoundError(key)
        return self.objects[key][start : start + length]

    def size(self, key: str) -> int | None:
        self.calls["size"] += 1
        return len(self.objects[key]) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        found = sorted(key for key in self.objects if key.startswith(prefix))
        self.calls["list"] += not found
        for at, key in enumerate(found):
            self.calls["list"] += at % 1000 == 0
            yield StoredObject(key, len(self.objects[key]), self._times.get(key, 0.0))

    def delete(self, key: str) -> None:
        self.calls["delete"] += 1
        self.objects.pop(key, None)

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        for key in keys:
            self.delete(key)
        return ()
