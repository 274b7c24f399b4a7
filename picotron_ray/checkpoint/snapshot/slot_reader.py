"""Reader of snapshot slots, for any process; ``slot_file.py`` has their layout. Torch-free."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from picotron_ray.checkpoint.snapshot.slot_format import (
    AREAS,
    AREAS_AT,
    MAGIC,
    PAGE,
    PIN_AT,
    SEAL_AT,
    UNSEALED,
    SlotHeader,
    SlotKey,
    seal_of,
)
from picotron_ray.errors import CorruptError, SlotError
from picotron_ray.layout.shards import Box, Shard

READING = 2
"""Pin word of a slot that an upload reads; 1: one that waits for its upload, 0: free."""


@dataclass(frozen=True, slots=True)
class SlotShard:
    """Shard in a slot: the place of its bytes, and their xxh3_128."""

    shard: Shard
    offset: int  # from the start of the file
    digest: bytes


class SlotHead:
    """All of a slot but its body: what its seal vouches for.

    It is a copy, so that nothing written over the slot later comes into it. Its table, which takes most of
    the time, is parsed once, when it is first asked for.
    """

    def __init__(self, name: str, parts: Sequence[memoryview]) -> None:
        """
        Args:
            parts: areas, seal, table, digests, header and ledger, as `SlotView.head` lists them.

        Raises:
            CorruptError: they do not match the seal.
        """
        self.parts = tuple(bytes(part) for part in parts)
        areas, self.seal, *sealed = self.parts
        # an unsealed slot has a seal of zeros, which nothing hashes to; a truncated one's parts are short
        if len(areas) != AREAS.size or seal_of(areas, sealed) != self.seal:
            raise CorruptError(f"slot {name} is not sealed; use an older snapshot", where=name)
        self.header = _header(*sealed[2:])
        self._shards: tuple[SlotShard, ...] | None = None
        self._parsing = threading.Lock()

    @property
    def shards(self) -> tuple[SlotShard, ...]:
        """All shards of the slot; any thread may ask."""
        with self._parsing:
            if self._shards is None:
                areas, _, table, digests, *_ = self.parts
                self._shards = _shards(table, digests, AREAS.unpack(areas)[2])
            return self._shards


class SlotView:
    """A sealed slot, mapped for reading.

    ``seal`` identifies the content: ``still_sealed`` tells after reading whether it was overwritten
    meanwhile.
    """

    def __init__(self, name: str, data: memoryview) -> None:
        self.name = name
        self._data = data
        self._head = SlotHead(name, _parts(data))
        self.seal, self.header = self._head.seal, self._head.header

    @property
    def shards(self) -> tuple[SlotShard, ...]:
        return self._head.shards

    def head(self) -> tuple[bytes, ...]:
        """Return the parts of its head, for a `SlotHead` elsewhere."""
        return self._head.parts

    def share_head(self, heads: MutableMapping[str, SlotHead]) -> None:
        """Take over the head that ``heads`` has of this slot, if it is of this seal; it is the last one then.

        Whoever shares ``heads`` with other threads holds a lock.
        """
        known = heads.pop(self.name, None)
        if known is not None and known.seal == self.seal:
            self._head = known
        heads[self.name] = self._head

    def raw(self, entry: SlotShard) -> memoryview:
        """The shard's bytes, unchecked."""
        return self._data[entry.offset : entry.offset + entry.shard.nbytes]

    def checked(self, entry: SlotShard) -> memoryview:
        """The shard's bytes.

        Raises:
            CorruptError: they do not match their digest.
        """
        data = self.raw(entry)
        if xxhash.xxh3_128_digest(data) != entry.digest:
            raise CorruptError(
                f"slot {self.name}: {entry.shard.name} at {entry.shard.box.offset} does not match its digest;"
                " use another copy or an older snapshot",
                where=self.name,
            )
        return data

    def still_sealed(self) -> bool:
        return bytes(self._data[SEAL_AT : SEAL_AT + 16]) == self.seal


def open_slot(source: str | os.PathLike[str] | bytes | bytearray | memoryview, name: str = "") -> SlotView:
    """Map a slot file, or wrap a copy of its bytes.

    Raises:
        CorruptError: it is not sealed, torn or truncated.
        SlotError: there is no such file.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return SlotView(name or "<bytes>", memoryview(source))
    path = Path(source)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise SlotError(f"slot {path} does not exist; its node's slots were removed") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise CorruptError(f"slot {path.name} is empty; use an older snapshot", where=path.name) from error
    return SlotView(name or path.name, memoryview(mapped))


def read_header(path: str | os.PathLike[str]) -> SlotHeader | None:
    """Read the header of a sealed slot; None where it is unsealed, torn, truncated or no slot at all.

    Raises:
        SlotError: there is no such file.
    """
    try:
        return open_slot(path).header
    except CorruptError:
        return None


def verify(path: str | os.PathLike[str], name: str = "") -> SlotView:
    """Check every shard's digest, and that the slot was not overwritten meanwhile.

    Raises:
        CorruptError: naming the slot and the tensor.
    """
    view = open_slot(path, name)
    for entry in view.shards:
        view.checked(entry)
    if not view.still_sealed():
        raise CorruptError(f"slot {view.name} was overwritten while it was read", where=view.name)
    return view


def holds(path: str | os.PathLike[str], key: SlotKey) -> bool:
    """Whether a slot file is still that state's, sound or damaged; False: it is reused, or being overwritten.

    A damaged header may say anything: only an unsealed file, and a sealed one of another key, are others'.
    """
    try:
        with Path(path).open("rb") as file:
            sealed = os.pread(file.fileno(), len(UNSEALED), SEAL_AT) != UNSEALED
        header = read_header(path)
    except (FileNotFoundError, SlotError):
        return False
    return sealed and (header is None or header.key == key)


def is_pinned(path: str | os.PathLike[str]) -> bool:
    """Whether the slot is kept for an upload."""
    with Path(path).open("rb") as file:
        return os.pread(file.fileno(), 1, PIN_AT) != b"\x00"


def set_pinned(path: str | os.PathLike[str], pinned: bool, reading: bool = False) -> None:
    """Pin or release a slot from another process than its writer (the node's agent).

    ``reading``: an upload is at it; the writer may then not give it up for a newer checkpoint.
    """
    with Path(path).open("r+b") as file:
        os.pwrite(file.fileno(), bytes([READING if pinned and reading else int(pinned)]), PIN_AT)


def _parts(data: memoryview) -> list[memoryview]:
    """The parts of a slot's head; too few bytes where it is torn or no slot at all."""
    if len(data) < PAGE or bytes(data[: len(MAGIC)]) != MAGIC:
        return [data[:0]] * 6
    prefix = data[AREAS_AT : AREAS_AT + AREAS.size]
    areas = AREAS.unpack(prefix)
    sealed = [data[areas[i] : areas[i] + areas[i + 1]] for i in (0, 4, 6, 8)]
    return [prefix, data[SEAL_AT : SEAL_AT + 16], *sealed]


def _header(encoded: bytes, ledger: bytes) -> SlotHeader:
    fields = json.loads(encoded)
    fields["fragments"] = tuple(tuple(part) for part in fields["fragments"])
    lines = ledger.decode()
    return SlotHeader(**fields, ledger=tuple(lines.split("\n")) if lines else ())


def _shards(table: bytes, digests: bytes, body_at: int) -> tuple[SlotShard, ...]:
    rows = json.loads(table)
    return tuple(
        SlotShard(
            Shard(name, dtype, tuple(shape), Box(tuple(offset), tuple(size))),
            body_at + at,
            digests[16 * i : 16 * i + 16],
        )
        for i, (name, dtype, shape, offset, size, at) in enumerate(rows)
    )
