"""Manifest of a checkpoint: one JSON object that lists its tensors, chunks and ledger.

It names every tensor's shards by chunk and byte range, the chunks by address and codec, and the ledger
segments of the whole lineage by digest. Its own digest is in the commit entry of the log. Nothing here
is unpickled, and an unknown schema version is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, decode_json, encode_json, get_bounded
from picotron_ray.checkpoint.store.schema import refuse_newer
from picotron_ray.errors import CorruptError, NotFoundError
from picotron_ray.layout.cover import missing
from picotron_ray.layout.shards import DTYPE_BYTES, Box, Shard, whole

SCHEMA = 1
UPDATES = "update_policy"
"""Key in ``extra``: the number of updates left out, and the record from which more may be (`train`)."""
INITIAL_WEIGHTS = "initial_weights"
"""Key in ``extra``: version of the values that the run began with (`models.layers.init`). Without it: 1, or
the run began with weights from elsewhere."""
EVALUATION = "evaluation"
"""Key in ``extra``: figures of the evaluation of this very state, by name (`train.evaluation`)."""
LINE_BYTES = 4 << 20  # most, of a ledger's line: one step
MANIFEST_BYTES = 1 << 30  # most; a model of 70 billion parameters takes some 50 MiB
_ADDRESS = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A chunk's stored and raw length in bytes, and its codec."""

    size: int
    raw_size: int
    codec: str = "none"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """Box of a tensor, stored from ``start`` of a chunk's raw bytes; its digest is xxh3_128 in hex."""

    shard: Shard
    chunk: str
    start: int
    digest: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Ledger object: the steps ``first..last`` (inclusive), its blake3 in hex."""

    key: str
    first: int
    last: int
    digest: str

    @property
    def most_bytes(self) -> int:
        """Most bytes that its lines can have."""
        return LINE_BYTES * (self.last - self.first + 1)


def segment_row(segment: Segment) -> list[str | int]:
    """A segment as manifests and commit entries hold it; ``Segment(*row)`` reads it."""
    return [segment.key, segment.first, segment.last, segment.digest]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checkpoint at ``step``, written by generation (term, n).

    Fields:
        cursor: samples consumed.
        layout: ``Layout.to_dict()`` of the writers (for information; any layout can restore).
        shards: together they cover every tensor.
        chunks: by address.
        ledger: segments from step 1 on, in order, without gaps.
        extra: whatever else the trainer stored in its slots.
    """

    step: int
    term: int
    n: int
    cursor: int
    layout: dict[str, Any]
    shards: tuple[StoredShard, ...]
    chunks: dict[str, ChunkInfo]
    ledger: tuple[Segment, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks.values())

    @property
    def key(self) -> str:
        """Storage key of it, unless an abandoned attempt took that name."""
        return f"manifests/{self.step}-{self.term}-{self.n}.json"

    def tensors(self) -> dict[str, list[StoredShard]]:
        found: dict[str, list[StoredShard]] = {}
        for stored in self.shards:
            found.setdefault(stored.shard.name, []).append(stored)
        return found

    def encode(self) -> bytes:
        tensors = [
            {
                "name": name,
                "dtype": stored[0].shard.dtype,
                "shape": stored[0].shard.global_shape,
                "shards": [
                    {
                        "offset": part.shard.box.offset,
                        "size": part.shard.box.size,
                        "chunk": part.chunk,
                        "range": [part.start, part.shard.nbytes],
                        "digest": part.digest,
                    }
                    for part in stored
                ],
            }
            for name, stored in sorted(self.tensors().items())
        ]
        return encode_json(
            {
                "schema": SCHEMA,
                "step": self.step,
                "term": self.term,
                "n": self.n,
                "cursor": self.cursor,
                "layout": self.layout,
                "tensors": tensors,
                "chunks": {a: [c.size, c.raw_size, c.codec] for a, c in self.chunks.items()},
                "ledger": [segment_row(segment) for segment in self.ledger],
                "extra": self.extra,
            }
        )


def decode_manifest(key: str, data: bytes) -> Manifest:
    """Parse a manifest; CorruptError where it is damaged or incomplete, NewerSchemaError of a newer one."""
    value = decode_json(key, data)
    refuse_newer(f"manifest {key}", value.get("schema"), SCHEMA)
    if value.get("schema") != SCHEMA:
        raise CorruptError(
            f"manifest {key} has schema {value.get('schema')!r}, this version reads {SCHEMA}", where=key
        )
    try:
        manifest = Manifest(
            step=value["step"],
            term=value["term"],
            n=value["n"],
            cursor=value["cursor"],
            layout=value["layout"],
            shards=tuple(_stored(tensor, part) for tensor in value["tensors"] for part in tensor["shards"]),
            chunks={address: ChunkInfo(*info) for address, info in value["chunks"].items()},
            ledger=tuple(Segment(*segment) for segment in value["ledger"]),
            extra=value["extra"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"manifest {key} is malformed: {error!r}", where=key) from error
    problems = check(manifest)
    if problems:
        raise CorruptError(f"manifest {key}: {problems[0]}", where=key)
    return manifest


def check(manifest: Manifest) -> list[str]:
    """Check a manifest in itself; returns one line per missing box, range outside a chunk or ledger gap."""
    problems = []
    for name, stored in manifest.tensors().items():
        shape = stored[0].shard.global_shape
        gaps = missing(whole(shape), [part.shard.box for part in stored])
        if gaps:
            problems.append(f"{name}: {gaps[0].size} at {gaps[0].offset} is missing of {list(shape)}")
    for part in manifest.shards:
        info = manifest.chunks.get(part.chunk)
        if info is None or part.start < 0 or part.start + part.shard.nbytes > info.raw_size:
            problems.append(f"{part.shard.name}: its bytes lie outside chunk {part.chunk[:12]}")
    problems += [
        f"{address!r} is no chunk address" for address in manifest.chunks if not _ADDRESS.fullmatch(address)
    ]
    at = 0
    for segment in manifest.ledger:
        if segment.first != at + 1 or segment.last < segment.first:
            problems.append(f"ledger segment {segment.key} begins at step {segment.first}, expected {at + 1}")
        at = segment.last
    if at != manifest.step:
        problems.append(f"the ledger ends at step {at}, expected {manifest.step}")
    return problems


class Identity(NamedTuple):
    """State that a commit entry promises: its step, and the generation (term, n) that wrote it."""

    step: int
    term: int
    n: int


class Identified(Protocol):
    """Manifest, or what is known of one."""

    @property
    def step(self) -> int: ...

    @property
    def term(self) -> int: ...

    @property
    def n(self) -> int: ...


def load_manifest(storage: Storage, key: str, digest: str = "", identity: Identity | None = None) -> Manifest:
    """Read a manifest and check it against its commit entry.

    Args:
        digest: of its bytes; "" skips that.
        identity: the state that it must hold; None skips that.

    Raises:
        CorruptError: it is missing, damaged, or another one lies in its place; names the manifest.
    """
    manifest = read_manifest(storage, key, digest, decode_manifest)
    if identity is not None:
        check_identity(key, manifest, identity)
    return manifest


def read_manifest(storage: Storage, key: str, digest: str, decode: Callable[[str, bytes], T]) -> T:
    """Read a manifest's bytes, compare their digest ("" skips that) and decode them.

    Raises:
        CorruptError: it is missing, or does not match its digest, or ``decode`` says so.
    """
    try:
        data = get_bounded(storage, key, MANIFEST_BYTES)
    except NotFoundError as error:
        raise CorruptError(f"manifest {key} is missing from {storage.where}", where=key) from error
    if digest and blake3(data).hexdigest() != digest:
        raise CorruptError(f"manifest {key} does not match the digest in the log", where=key)
    return decode(key, data)


def check_identity(key: str, found: Identified, identity: Identity) -> None:
    """Raise CorruptError where a manifest holds another state than its commit entry promises."""
    if Identity(found.step, found.term, found.n) != identity:
        raise CorruptError(
            f"manifest {key} is of step {found.step}, generation {found.term}.{found.n}; the log says step"
            f" {identity.step}, generation {identity.term}.{identity.n}",
            where=key,
        )


def committed_manifest(storage: Storage, body: Mapping[str, Any]) -> Manifest:
    """The manifest of a commit entry's body; raises as `load_manifest`."""
    identity = Identity(body["step"], body["term"], body["n"])
    return load_manifest(storage, body["manifest"], body["digest"], identity)


def _stored(tensor: dict[str, Any], part: dict[str, Any]) -> StoredShard:
    box = Box(tuple(part["offset"]), tuple(part["size"]))
    shard = Shard(tensor["name"], tensor["dtype"], tuple(tensor["shape"]), box)
    if not len(box.offset) == len(box.size) == len(shard.global_shape) or tensor["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"shard of {shard.name} has the wrong rank or dtype")
    if part["range"][1] != shard.nbytes:
        raise ValueError(f"shard of {shard.name} has {part['range'][1]} bytes, expected {shard.nbytes}")
    return StoredShard(shard, part["chunk"], part["range"][0], part["digest"])
