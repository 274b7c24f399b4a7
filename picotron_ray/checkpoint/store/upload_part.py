"""Upload part: what one node gives to a manifest, and the bytes as which it travels to the coordinator.

A part of 100,000 chunks is some 20 MB of JSON. The coordinator hands the bytes on to the process that
assembles (``runtime.run_storage.assembly_process``), unread: parsing them would hold its Python's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from picotron_ray.checkpoint.storage.base import decode_json, encode_json
from picotron_ray.checkpoint.store.manifest import ChunkInfo, Segment, StoredShard, segment_row
from picotron_ray.layout.shards import Box, Shard


@dataclass(frozen=True)
class UploadPart:
    """One node's part of a checkpoint; turns into JSON and back.

    Fields:
        written_bytes: of new chunks; the others were in the store already.
        reused: chunks that were there.
        again: chunks that were put although they were there, as they were condemned or damaged.
        begun_s: when the upload put its intent, by the store's clock; 0: not known.
        segments: of the ledger before ``ledger``, stored already; oldest first.
    """

    intent: str
    term: int
    n: int
    step: int
    cursor: int
    layout: dict[str, Any]
    fragments: tuple[tuple[int, int, int], ...]
    shards: tuple[StoredShard, ...]
    chunks: dict[str, ChunkInfo]
    ledger: tuple[str, ...]
    extra: dict[str, Any]
    written_bytes: int = 0
    reused: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()
    again: tuple[str, ...] = ()
    begun_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[tuple[str, str, tuple[int, ...]], int] = {}
        places = {address: at for at, address in enumerate(self.chunks)}
        return {
            **plain,
            "shards": [_shard_row(stored, tensors, places) for stored in self.shards],
            "tensors": list(tensors),
            "chunks": [[address, c.size, c.raw_size, c.codec] for address, c in self.chunks.items()],
            "segments": [segment_row(segment) for segment in self.segments],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> UploadPart:
        named = {field.name: value[field.name] for field in fields(cls)}
        addresses = [row[0] for row in value["chunks"]]
        tensors = [(name, dtype, tuple(shape)) for name, dtype, shape in value["tensors"]]
        return cls(
            **{
                **named,
                "fragments": tuple(tuple(fragment) for fragment in value["fragments"]),
                "shards": tuple(_stored(row, tensors, addresses) for row in value["shards"]),
                "chunks": {address: ChunkInfo(*info) for address, *info in value["chunks"]},
                "ledger": tuple(value["ledger"]),
                "reused": tuple(value["reused"]),
                "segments": tuple(Segment(*row) for row in value["segments"]),
                "again": tuple(value["again"]),
            }
        )

    def encode(self) -> bytes:
        return encode_json(self.to_dict())


def decode_part(data: bytes) -> UploadPart:
    """Decode what `UploadPart.encode` made."""
    return UploadPart.from_dict(decode_json("the part of an upload", data))


def unsure_chunks(parts: Iterable[UploadPart], now_s: float, grace_s: float) -> set[str]:
    """Addresses that a commit has to look for: a collection may have taken them since the upload.

    Those that an upload put can have been condemned only after it began, unless they were before: then it
    puts them ``again``. They are deleted no sooner than the grace time after that (``gc.py``). So until then
    only what was there before it is unsure.

    Args:
        now_s: by the store's clock.
        grace_s: least time between the publication of a condemned list and its deletions.
    """
    found: set[str] = set()
    for part in parts:
        young = part.begun_s and 0 <= now_s - part.begun_s < grace_s / 2  # the entry is still to be written
        found.update((*part.reused, *part.again) if young else part.chunks)
    return found


def _shard_row(
    stored: StoredShard, tensors: dict[tuple[str, str, tuple[int, ...]], int], places: dict[str, int]
) -> list[Any]:
    shard = stored.shard
    tensor = tensors.setdefault((shard.name, shard.dtype, shard.global_shape), len(tensors))
    return [tensor, shard.box.offset, shard.box.size, places[stored.chunk], stored.start, stored.digest]


def _stored(
    row: list[Any], tensors: list[tuple[str, str, tuple[int, ...]]], addresses: list[str]
) -> StoredShard:
    tensor, offset, size, place, start, digest = row
    name, dtype, shape = tensors[tensor]
    shard = Shard(name, dtype, shape, Box(tuple(offset), tuple(size)))
    return StoredShard(shard, addresses[place], start, digest)
