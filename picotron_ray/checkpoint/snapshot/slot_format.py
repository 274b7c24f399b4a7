"""Format of a slot file: its areas, header and seal; ``slot_file.py`` says why it is so."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from picotron_ray.layout.shards import Shard

MAGIC = b"PRSLOT01"
PAGE = 4096
ALIGN = 64
SLACK_BYTES = 256 * 1024  # room for the ledger tail before a slot has to grow
AREAS = struct.Struct("<10Q")  # (offset, length) of table, body, digests, header, ledger
PIN_AT, AREAS_AT, SEAL_AT = 8, 16, 96
UNSEALED = bytes(16)

SlotKey = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Header of a slot: its writer, its place in the run, and the part of the state that it holds.

    Fields:
        term, n, step: generation and finished optimizer steps of the state.
        rank: of the writer, in its generation.
        fragments: ``(group, index, count)``: part ``index`` of ``count`` of state group ``group``.
        layout: ``Layout.to_dict()`` of the writers.
        cursor: samples consumed (the next global sample number).
        ledger: JSON lines since the last commit. Where the oldest were spilled to disk, the first line names
            their newest file instead (``ledger_spill``).
        extra: whatever else the trainer needs back (JSON).
    """

    term: int
    n: int
    step: int
    rank: int
    fragments: tuple[tuple[int, int, int], ...] = ()
    layout: dict[str, Any] = field(default_factory=dict)
    cursor: int = 0
    ledger: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> SlotKey:
        """Key that orders slots by age: a later generation is newer than any step of an earlier one."""
        return (self.term, self.n, self.step)


def align(value: int, unit: int = ALIGN) -> int:
    return -(-value // unit) * unit


def body_offsets(shards: Sequence[Shard]) -> tuple[list[int], int]:
    """Offset of each shard in the body, and the body's length, in bytes."""
    offsets, at = [], 0
    for shard in shards:
        offsets.append(at)
        at = align(at + shard.nbytes)
    return offsets, at


def slot_bytes(shards: Sequence[Shard]) -> int:
    """Bytes of a slot file that holds these shards, with room for a ledger tail."""
    return align(
        PAGE + len(encode_table(shards)) + body_offsets(shards)[1] + 16 * len(shards) + SLACK_BYTES, PAGE
    )


def encode_table(shards: Sequence[Shard]) -> bytes:
    offsets, _ = body_offsets(shards)
    rows = [
        [shard.name, shard.dtype, shard.global_shape, shard.box.offset, shard.box.size, at]
        for shard, at in zip(shards, offsets, strict=True)
    ]
    return json.dumps(rows, separators=(",", ":")).encode()


def seal_of(prefix: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    state = xxhash.xxh3_128(prefix)
    for part in parts:
        state.update(part)
    return state.digest()
