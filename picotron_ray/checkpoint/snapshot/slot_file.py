"""Snapshot slots: self-describing files in host memory that outlive the worker that wrote them.

One file holds what one rank copied of one step's state. Layout of the file::

    0     prefix   magic, pin word, five (offset, length) pairs, seal
    4096  table    JSON: per shard name, dtype, global shape, box, body offset   (static per generation)
    ...   body     the shards' bytes, each 64-byte aligned
    ...   digests  xxh3_128 of every shard, 16 bytes each
    ...   header   JSON: term, n, step, rank, fragments, layout, cursor
    ...   ledger   JSON lines

The seal is the xxh3_128 of everything but the body, and is zeroed before the first byte is overwritten and
written last: a reader in another process sees either a sealed slot or none (None), never a half one, and a
torn seal does not match. Shard digests are taken from the *source* buffers, so a bad copy is noticed too;
what a device writes into a slot by itself is digested where it lies. The pin word lies outside the seal: the
node's agent clears it when an upload is done.

Writing a slot of 360 shards (4.4 MB) costs 1.1 ms on a busy 2-core machine; copies of large shards run
without the GIL. Torch-free: agents read slots too.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from picotron_ray.checkpoint.snapshot.slot_format import (
    AREAS,
    AREAS_AT,
    MAGIC,
    PAGE,
    PIN_AT,
    SEAL_AT,
    SLACK_BYTES,
    UNSEALED,
    SlotHeader,
    SlotKey,
    align,
    body_offsets,
    encode_table,
    seal_of,
)
from picotron_ray.checkpoint.snapshot.slot_reader import (
    READING,
)
from picotron_ray.errors import SlotError, SlotRoomError
from picotron_ray.layout.shards import Shard

GROW_BYTES = 256 << 20
CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
Buffer = Any  # anything with the buffer protocol: numpy array, memoryview, bytes
Place = np.ndarray[Any, np.dtype[np.uint8]]
Content = Iterable[Buffer | None] | Callable[[Sequence[Place] | None], Iterable[Buffer | None]]
"""What `SlotFile.write` takes: bytes of each shard, or what makes them once the slot is open for them.

It is given the shards' places in the slot where pages are locked, None elsewhere. A buffer that is (a part
of) the shard's place has been written there, and is digested alone.
"""


class PageLocks(Protocol):
    """Way to lock pages in memory, so that a device writes into them by itself."""

    def lock(self, address: int, length: int) -> bool:
        """Lock memory in place, both multiples of a page; False where it is refused."""

    def unlock(self, address: int) -> None:
        """Give back what was locked at an address."""


class SlotFile:
    """Snapshot slot, as its writer sees it."""

    def __init__(self, path: Path, descriptor: int, capacity: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, capacity)
        self._locks: PageLocks | None = None  # that have locked the map
        self._mapping = threading.Lock()  # held while the map changes, or is being locked
        self._closed = False
        self._shards: tuple[Shard, ...] = ()
        self._offsets: list[int] = []
        self._body_bytes = 0
        self._encoded_table = b"[]"
        self._digests: list[bytes] = []
        self._written: SlotKey | None = None
        self.key: SlotKey | None = None

    @classmethod
    def create(cls, path: str | os.PathLike[str], capacity: int) -> SlotFile:
        """Make an unsealed slot of ``capacity`` bytes, allocated and touched (later copies are fast).

        Raises:
            SlotRoomError: the file system has no room for it.
            SlotError: the folder cannot be written.
        """
        path, capacity = Path(path), align(max(capacity, 2 * PAGE), PAGE)
        try:
            descriptor = os.open(path, CREATE, 0o600)
        except OSError as error:
            raise SlotError(f"cannot create slot {path}: {error.strerror}; check snapshot.folder") from error
        try:
            _allocate(path, descriptor, 0, capacity)
        except SlotError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        slot = cls(path, descriptor, capacity)
        np.frombuffer(slot._map, dtype=np.uint8)[::PAGE] = 0
        slot._map[: len(MAGIC)] = MAGIC
        return slot

    @property
    def capacity(self) -> int:
        return len(self._map)

    @property
    def pinned(self) -> bool:
        """Whether an upload still needs this slot; the agent may clear it from another process."""
        return self._map[PIN_AT] != 0

    @property
    def waiting(self) -> bool:
        """Pinned, and no upload has begun to read it."""
        return self._map[PIN_AT] not in (0, READING)

    @property
    def locked(self) -> bool:
        """Whether its pages are locked, so that a device writes into them by itself."""
        return self._locks is not None

    @property
    def locking(self) -> bool:
        """Whether its pages are being locked; the host may write into them meanwhile."""
        return self._locks is None and self._mapping.locked()

    def lock_pages(self, locks: PageLocks) -> bool:
        """Lock the pages until the slot grows or is closed, which wait for it; False where it is refused."""
        with self._mapping:
            if self._closed or self._locks is not None:
                return True
            if not locks.lock(self._address, self.capacity):
                return False
            self._locks = locks
            return True

    def set_pinned(self, pinned: bool) -> None:
        self._map[PIN_AT] = int(pinned)

    def holds(self, header: SlotHeader, shards: Sequence[Shard]) -> bool:
        """Whether the same shards of an earlier state of the same generation lie in the body.

        Then those that nothing changes within a generation need not be written again.
        """
        known = self._written is not None and self._written[:2] == header.key[:2]
        return known and tuple(shards) == self._shards

    def write(
        self,
        header: SlotHeader,
        shards: Sequence[Shard],
        buffers: Content,
        *,
        pinned: bool = False,
        check: Callable[[], None] = lambda: None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        """Replace the slot's content; it is unsealed until the last byte is there.

        Args:
            header: identity of the state.
            shards: what is written, in the order of ``buffers``; reuse the same tuple between steps.
            buffers: C-contiguous bytes of each shard, or an iterator over them in parts, each valid until the
                next one; None of one that stays as it lies there (`holds`). Or what makes them (`Content`).
            pinned: keep it from being reused until the pin is cleared.
            check: called when the body is written; what it raises leaves the slot unsealed.
            on_phase: called once with "snapshot" when half of the body is written (scripted faults).

        Raises:
            SlotRoomError: the slot cannot grow; it holds what it held.
            SlotError: a buffer's length does not fit its shard.
        """
        if not self.holds(header, shards):
            self._digests = []
        self._written = None
        self._set_shards(tuple(shards))
        meta = {key: value for key, value in asdict(header).items() if key != "ledger"}
        encoded = json.dumps(meta, separators=(",", ":")).encode()
        ledger = "\n".join(header.ledger).encode()
        areas = self._place(len(encoded), len(ledger))
        needed = areas[8] + areas[9]
        if needed > self.capacity:
            self.grow(needed + SLACK_BYTES)  # before anything is void: it may fail
        self.unseal()
        if callable(buffers):
            buffers = buffers(self._places(areas[2]) if self.locked else None)
        digests = self._copy_body(areas[2], buffers, on_phase)
        check()
        prefix = AREAS.pack(*areas)
        self._map[AREAS_AT : AREAS_AT + len(prefix)] = prefix
        parts = (self._encoded_table, digests, encoded, ledger)
        for at, part in zip((areas[0], areas[4], areas[6], areas[8]), parts, strict=True):
            self._map[at : at + len(part)] = part
        self.set_pinned(pinned)
        self._map[SEAL_AT : SEAL_AT + 16] = seal_of(prefix, parts)
        self.key = self._written = header.key

    def grow(self, capacity: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Enlarge the slot to ``capacity`` bytes, allocated and touched; what it holds stays, sealed or not.

        Its pages are not locked any more.

        Args:
            stopped: asked every 256 MiB; once it is true, the slot stays as large as it has become.

        Raises:
            SlotRoomError: the file system has no room for it; nothing has changed.
        """
        old, capacity = self.capacity, align(capacity, PAGE)
        reached = old
        if free_bytes(self.path.parent) < capacity - old:  # not tried: others would find no room meanwhile
            raise SlotRoomError(_no_room(self.path, capacity))
        while reached < capacity and not stopped():
            step = min(GROW_BYTES, capacity - reached)
            try:
                _allocate(self.path, self._descriptor, reached, step)
            except SlotRoomError:
                os.ftruncate(self._descriptor, old)
                raise
            reached += step
        if reached == old:
            return
        larger = mmap.mmap(self._descriptor, reached)
        np.frombuffer(larger, dtype=np.uint8)[old::PAGE] = 0
        with self._mapping:
            self._unlock_pages()
            self._map = larger

    def unseal(self) -> None:
        """Void the content before its first byte is overwritten."""
        self._map[SEAL_AT : SEAL_AT + 16] = UNSEALED
        self.key = None

    def close(self, unlink: bool = False) -> None:
        """Close the file; ``unlink`` removes it from the folder too."""
        with self._mapping:
            self._closed = True
            self._unlock_pages()
            with contextlib.suppress(BufferError):  # a traceback may hold a view: it is unmapped with that
                self._map.close()
        os.close(self._descriptor)
        if unlink:
            self.path.unlink(missing_ok=True)

    @property
    def _address(self) -> int:
        return _address_of(np.frombuffer(self._map, dtype=np.uint8))

    def _unlock_pages(self) -> None:
        locks, self._locks = self._locks, None
        if locks is not None:
            locks.unlock(self._address)

    def _places(self, body_at: int) -> list[Place]:
        whole = np.frombuffer(self._map, dtype=np.uint8)
        starts = [body_at + offset for offset in self._offsets]
        return [whole[at : at + shard.nbytes] for at, shard in zip(starts, self._shards, strict=True)]

    def _set_shards(self, shards: tuple[Shard, ...]) -> None:
        if shards is not self._shards and shards != self._shards:
            self._offsets, self._body_bytes = body_offsets(shards)
            self._encoded_table = encode_table(shards)
        self._shards = shards

    def _place(self, header_bytes: int, ledger_bytes: int) -> tuple[int, ...]:
        body_at = align(PAGE + len(self._encoded_table))
        digests_at = body_at + self._body_bytes
        header_at = digests_at + 16 * len(self._shards)
        ledger_at = header_at + header_bytes
        return (
            *(PAGE, len(self._encoded_table), body_at, self._body_bytes),
            *(digests_at, 16 * len(self._shards), header_at, header_bytes, ledger_at, ledger_bytes),
        )

    def _copy_body(
        self, body_at: int, buffers: Iterable[Buffer | None], on_phase: Callable[[str], None] | None
    ) -> bytes:
        target, known = np.frombuffer(self._map, dtype=np.uint8), self._digests
        self._digests = digests = []
        half = self._body_bytes // 2 if on_phase else None
        for at, (shard, offset, buffer) in enumerate(zip(self._shards, self._offsets, buffers, strict=True)):
            if buffer is None:
                digests.append(known[at])
                continue
            digest, start, end = xxhash.xxh3_128(), body_at + offset, 0
            for part in buffer if isinstance(buffer, Iterator) else (buffer,):
                source = np.frombuffer(part, dtype=np.uint8)
                begin, end = end, end + source.nbytes
                if end > shard.nbytes:
                    break
                place = target[start + begin : start + end]
                if _address_of(source) != _address_of(place):
                    np.copyto(place, source)
                digest.update(source.data)
            if end != shard.nbytes:
                raise SlotError(
                    f"shard {shard.name}: saw {end} bytes, expected {shard.nbytes} for box "
                    f"{shard.box.size} of {shard.dtype}; the tensor and its box disagree"
                )
            digests.append(digest.digest())
            if half is not None and on_phase and offset + shard.nbytes >= half:
                half = None
                on_phase("snapshot")
        return b"".join(digests)


def _address_of(data: Place) -> int:
    return int(data.__array_interface__["data"][0])


def _allocate(path: Path, descriptor: int, start: int, length: int) -> None:
    try:
        os.posix_fallocate(descriptor, start, length)
    except OSError as error:
        raise SlotRoomError(_no_room(path, start + length, f" ({error.strerror})")) from error


def _no_room(path: Path, needed: int, why: str = "") -> str:
    return (
        f"snapshot slot {path.name} needs {needed} bytes and {path.parent} has {free_bytes(path.parent)} free"
        f"{why}; enlarge it, or set snapshot.overflow_folder before launch"
    )


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes that an unprivileged process can still allocate in the folder's file system."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
