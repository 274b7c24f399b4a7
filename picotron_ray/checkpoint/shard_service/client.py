"""Slots of another node, read through its shard service a box at a time. Torch-free.

One connection per node serves all its slots, opened when the first is. Nothing larger than a frame is held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import xxhash

from picotron_ray.checkpoint.shard_service.channel import (
    MESSAGE,
    MOST_BYTES,
    REFUSAL,
    Channel,
    Endpoint,
    nothing,
)
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_reader import SlotHead, SlotShard
from picotron_ray.errors import CorruptError, ServiceBusyError, SlotUnreachableError
from picotron_ray.layout.shards import Array, Box, Shard, element_type

Data = TypeVar("Data")


class ShardClient:
    """Shard service of another node."""

    def __init__(
        self,
        find: Callable[[], Endpoint],
        timeout_s: float,
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        """
        Args:
            find: asks for the service's address; raises SlotUnreachableError.
            timeout_s: longest wait for an answer, and for a frame.
            meanwhile: called again and again while it waits; what it raises ends the wait.
        """
        self._find, self._timeout_s, self._meanwhile = find, timeout_s, meanwhile
        self._busy_at: Endpoint | None = None  # where it was found and could not take one more
        self.channel: Channel | None = None
        """Connection that there is. The service knows only the slots that were opened on it."""
        self.answered = False
        """Whether this connection has worked: one that breaks later is worth another."""

    def ask(self, **request: Any) -> Channel:
        """Send a request; the answer comes from the channel.

        Raises:
            ServiceBusyError: there is no connection, and the service cannot take one more.
            SlotUnreachableError: it does not answer.
        """
        if self.channel is None:
            self.channel = self._connected()
        self.channel.send_json(MESSAGE, request)
        return self.channel

    def _connected(self) -> Channel:
        found, self._busy_at = self._busy_at or self._find(), None
        try:
            return Channel.connect(found, self._timeout_s, self._meanwhile)
        except ServiceBusyError:
            self._busy_at = found
            raise

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel, self.answered = None, False


class RemoteSlot:
    """A sealed slot of another node: what `SlotView` is for one of its own."""

    def __init__(self, client: ShardClient, name: str, key: SlotKey) -> None:
        """Open a slot and check its table and header against its seal.

        Raises:
            SlotUnreachableError: the service does not answer, or does not have that slot of that key.
        """
        self._client, self.name = client, name
        with _naming(name):
            head = self._open()
        self.seal, self.header, self.shards = head.seal, head.header, head.shards
        self._number = {id(entry): number for number, entry in enumerate(self.shards)}
        if self.header.key != key:
            raise SlotUnreachableError(f"slot {name} holds {self.header.key} now, expected {key}", name)

    def _open(self) -> SlotHead:
        """Open the slot on the connection that there is, or on a new one."""
        try:
            head = SlotHead(self.name, self._fetch_head())
        except CorruptError as error:  # overwritten while it was sent
            raise SlotUnreachableError(str(error), self.name) from error
        self._opened_on = self._client.channel
        return head

    def _fetch_head(self) -> list[memoryview]:
        channel = self._client.ask(what="open", slot=self.name)
        lengths = json.loads(bytes(self._answer(channel)))["lengths"]
        data = self._fetch(channel, sum(lengths))
        parts, at = [], 0
        for length in lengths:
            parts.append(memoryview(data)[at : at + length])
            at += length
        return parts

    def _fetch(self, channel: Channel, length: int) -> bytearray:
        data = bytearray()
        while len(data) < length:
            data += self._answer(channel)
        return data

    def spilled(self, name: str) -> bytes:
        """A spilled part of the slot's ledger, unchecked; empty where its node does not have it any more."""

        def read() -> bytes:
            channel = self._client.ask(what="spilled", slot=self.name, name=name)
            return bytes(self._fetch(channel, json.loads(bytes(self._answer(channel)))["length"]))

        return self._read_over(read)

    def _answer(self, channel: Channel) -> memoryview:
        kind, data = channel.receive(MOST_BYTES)
        self._client.answered = True
        if kind != REFUSAL:
            return data
        refusal = json.loads(bytes(data))
        if refusal["kind"] == "corrupt":
            raise CorruptError(refusal["text"], where=self.name)
        raise SlotUnreachableError(refusal["text"], self.name)

    def boxes(self, entry: SlotShard, wanted: Box) -> Iterator[tuple[Box, Array]]:
        """Yield what is ``wanted`` of a shard in boxes of at most a frame, as bit patterns.

        An array is valid until the next one. Where all of the shard is wanted, its
        digest is checked here too.

        Raises:
            CorruptError: the shard does not match its digest.
            SlotUnreachableError: the service does not answer.
        """
        shard = entry.shard
        digest = xxhash.xxh3_128() if wanted == shard.box else None
        for box in frames(wanted, shard):
            data = self._box(entry, box)
            if digest is not None:
                digest.update(data)
            yield box, np.frombuffer(data, dtype=element_type(shard.dtype)).reshape(box.size)
        if digest is not None and digest.digest() != entry.digest:
            raise CorruptError(f"slot {self.name}: {shard.name} does not match its digest", where=self.name)

    def _box(self, entry: SlotShard, box: Box) -> memoryview:
        offset = [at - base for at, base in zip(box.offset, entry.shard.box.offset, strict=True)]
        number = self._number[id(entry)]
        data = self._read_over(lambda: self._read(number, offset, box))
        if len(data) != box.numel * element_type(entry.shard.dtype).itemsize:
            raise SlotUnreachableError(f"slot {self.name}: saw {len(data)} bytes of {box.size}", self.name)
        return data

    def _read_over(self, read: Callable[[], Data]) -> Data:
        """Read, and once more over a new connection where one breaks that has worked."""
        with _naming(self.name):
            try:
                return self._read_opened(read)
            except SlotUnreachableError as error:
                if error.where or not self._client.answered:  # the service said so, or never spoke
                    raise
                self._client.close()
                return self._read_opened(read)

    def _read_opened(self, read: Callable[[], Data]) -> Data:
        """Read, after the slot was opened on a connection that another slot, or this read, made anew.

        The service was started again, or has closed a connection that was idle for long.
        """
        if self._client.channel is not self._opened_on and self._open().seal != self.seal:
            raise SlotUnreachableError(f"slot {self.name} was overwritten", self.name)
        return read()

    def _read(self, number: int, offset: list[int], box: Box) -> memoryview:
        channel = self._client.ask(what="read", slot=self.name, shard=number, offset=offset, size=box.size)
        return self._answer(channel)

    def check(self) -> None:
        """Raise SlotUnreachableError where the slot was overwritten since it was opened."""
        self._read_over(lambda: self._answer(self._client.ask(what="check", slot=self.name)))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say which slot could not be had."""
    try:
        yield
    except SlotUnreachableError as error:
        raise error if error.where else type(error)(f"slot {name}: {error}", name) from error


def frames(box: Box, shard: Shard, most_bytes: int = MOST_BYTES) -> Iterator[Box]:
    """Cut a box of a shard into boxes of at most ``most_bytes``, in row-major order."""
    item_bytes = element_type(shard.dtype).itemsize
    if box.numel * item_bytes <= most_bytes:
        if box.numel:
            yield box
        return
    axis = next(i for i, size in enumerate(box.size) if size > 1)
    step = max(1, most_bytes * box.size[axis] // (box.numel * item_bytes))
    for at in range(0, box.size[axis], step):
        offset, size = list(box.offset), list(box.size)
        offset[axis], size[axis] = offset[axis] + at, min(step, size[axis] - at)
        yield from frames(Box(tuple(offset), tuple(size)), shard, most_bytes)
