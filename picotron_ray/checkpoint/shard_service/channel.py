"""Authenticated channel of the shard service: frames over TCP, each with a keyed digest. Torch-free.

Both ends prove that they hold the same token, without sending it: each signs the other's random number with
it (keyed BLAKE3). The two numbers and the token make a key of the connection, under which every frame is
signed together with its number and direction. So a frame that was damaged, left out, repeated or put in by
others is noticed. Content is not encrypted: the service belongs on the network that carries gradients too.

A frame is ``kind (1 byte), length (4), digest (32), payload``, the payload of at most ``MOST_BYTES``. Every
operation has a deadline for the frame as a whole, so that a peer that drips bytes counts as silent too.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from picotron_ray.errors import ServiceBusyError, SlotUnreachableError

MOST_BYTES = 16 << 20
"""Most bytes of a frame's payload."""
MESSAGE, REFUSAL, WAIT = range(3)
"""Kinds of a frame; ``WAIT``: none yet, but the other end lives and has not forgotten."""
MAGIC = b"PRSHARD1"
BUSY = b"PRSHBUSY"
"""Greeting of a service that takes no more connections for now; it closes this one."""
NONCE_BYTES = 32
POLL_S = 0.1
_FRAME = struct.Struct("<BI32s")
_COUNT = struct.Struct("<cBQ")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of an agent's shard service, and the token that opens it; never logged."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        return f"Endpoint({self.host}:{self.port})"


def nothing() -> None:
    """Do nothing while a channel waits."""


class Channel:
    """One end of a connection after `accept` or `connect`."""

    def __init__(
        self, connection: socket.socket, timeout_s: float, meanwhile: Callable[[], None] = nothing
    ) -> None:
        """
        Args:
            timeout_s: longest that one frame may take.
            meanwhile: called every ``POLL_S`` of a wait; what it raises ends the wait.
        """
        self._socket, self._timeout_s, self._meanwhile = connection, timeout_s, meanwhile
        connection.settimeout(POLL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._key = b""
        self._mine, self._theirs = b"?", b"?"
        self._sent = self._received = 0
        self._buffer = bytearray()  # of the newest frame

    # --- handshake -----------------------------------------------------------------------------------

    @staticmethod
    def refuse(connection: socket.socket) -> None:
        """Tell a client that it has to come again, without waiting for it, and close the connection."""
        with connection:
            connection.setblocking(False)
            with suppress(OSError):  # it is gone, or takes no byte: nothing is owed to it
                connection.send(BUSY + bytes(NONCE_BYTES))

    @classmethod
    def accept(cls, connection: socket.socket, token: str, timeout_s: float) -> Channel:
        """Take a client in; raises SlotUnreachableError where it does not hold the token."""
        channel = cls(connection, timeout_s)
        ours = os.urandom(NONCE_BYTES)
        channel._send_all(MAGIC + ours)
        answer = channel._receive_exactly(2 * NONCE_BYTES)
        theirs, proof = bytes(answer[:NONCE_BYTES]), bytes(answer[NONCE_BYTES:])
        channel._judge(proof, _proof(token, b"client", ours, theirs))
        channel._send_all(_proof(token, b"server", ours, theirs))
        channel._open(token, b"S", ours, theirs)
        return channel

    @classmethod
    def connect(
        cls, endpoint: Endpoint, timeout_s: float, meanwhile: Callable[[], None] = nothing
    ) -> Channel:
        """Connect to a service.

        Raises:
            ServiceBusyError: it serves as many as it can.
            SlotUnreachableError: it does not answer in time, or does not hold the token.
        """
        channel = cls(_connected(endpoint, timeout_s, meanwhile), timeout_s, meanwhile)
        try:
            greeting = channel._receive_exactly(len(MAGIC) + NONCE_BYTES)
            if bytes(greeting[: len(MAGIC)]) == BUSY:
                raise ServiceBusyError(f"the shard service of {endpoint.host} is busy")
            if bytes(greeting[: len(MAGIC)]) != MAGIC:
                raise SlotUnreachableError(f"{endpoint.host}:{endpoint.port} is no shard service")
            theirs, ours = bytes(greeting[len(MAGIC) :]), os.urandom(NONCE_BYTES)
            channel._send_all(ours + _proof(endpoint.token, b"client", theirs, ours))
            proof = bytes(channel._receive_exactly(NONCE_BYTES))
            channel._judge(proof, _proof(endpoint.token, b"server", theirs, ours))
        except BaseException:
            channel.close()
            raise
        channel._open(endpoint.token, b"C", theirs, ours)
        return channel

    def _judge(self, proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise SlotUnreachableError("the other end does not hold the token of this shard service")

    def _open(self, token: str, mine: bytes, server: bytes, client: bytes) -> None:
        self._key = _proof(token, b"session", server, client)
        self._mine, self._theirs = mine, b"C" if mine == b"S" else b"S"

    # --- frames --------------------------------------------------------------------------------------

    def send(self, kind: int, payload: Any) -> None:
        """Send a frame; ``payload``: contiguous bytes."""
        data = memoryview(payload).cast("B")
        if len(data) > MOST_BYTES:
            raise ValueError(f"a frame has at most {MOST_BYTES} bytes, saw {len(data)}")
        head = _FRAME.pack(kind, len(data), self._sign(self._mine, kind, self._sent, data))
        self._sent += 1
        self._send_all(head)
        self._send_all(data)

    def send_json(self, kind: int, value: Any) -> None:
        self.send(kind, json.dumps(value, separators=(",", ":")).encode())

    def receive(self, most: int = MOST_BYTES, idle_s: float = 0.0) -> tuple[int, memoryview]:
        """Receive a frame; returns its kind and payload, which is valid until the next call.

        Args:
            most: larger frames are refused before a byte of them is read.
            idle_s: how much longer than a frame may take its beginning is waited for.

        Raises:
            SlotUnreachableError: the other end is gone, silent, or sends what does not match its digest.
        """
        kind = WAIT
        while kind == WAIT:
            self._meanwhile()
            kind, data = self._receive_one(most, idle_s)
        return kind, data

    def _receive_one(self, most: int, idle_s: float) -> tuple[int, memoryview]:
        kind, length, digest = _FRAME.unpack(self._receive_exactly(_FRAME.size, idle_s))
        if length > most:
            raise SlotUnreachableError(f"the shard service sent {length} bytes, expected at most {most}")
        data = self._receive_exactly(length)
        if not hmac.compare_digest(digest, self._sign(self._theirs, kind, self._received, data)):
            raise SlotUnreachableError("a frame of the shard service does not match its digest")
        self._received += 1
        return kind, data

    def _sign(self, sender: bytes, kind: int, number: int, data: memoryview) -> bytes:
        state = blake3(_COUNT.pack(sender, kind, number), key=self._key)
        state.update(data)
        return state.digest()

    def _send_all(self, data: Any) -> None:
        left, deadline = memoryview(data), time.monotonic() + self._timeout_s
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                self._wait(deadline)
            except OSError as error:
                raise SlotUnreachableError(f"the shard service is gone: {error.strerror}") from error

    def _receive_exactly(self, length: int, idle_s: float = 0.0) -> memoryview:
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        data = left = memoryview(self._buffer)[:length]
        deadline = time.monotonic() + idle_s + self._timeout_s
        while left:
            try:
                count = self._socket.recv_into(left)
            except TimeoutError:
                self._wait(deadline)
                continue
            except OSError as error:
                raise SlotUnreachableError(f"the shard service is gone: {error.strerror}") from error
            if not count:
                raise SlotUnreachableError("the other end of the shard service closed the connection")
            left = left[count:]
            if time.monotonic() > deadline:  # it drips
                self._wait(deadline)
        return data

    def _wait(self, deadline: float) -> None:
        self._meanwhile()
        if time.monotonic() > deadline:
            raise SlotUnreachableError(f"the shard service did not answer within {self._timeout_s:g} s")

    def close(self) -> None:
        self._socket.close()


def _proof(token: str, role: bytes, server: bytes, client: bytes) -> bytes:
    key = blake3(token.encode(), derive_key_context="picotron_ray shard service token").digest()
    return blake3(role + server + client, key=key).digest()


def _connected(endpoint: Endpoint, timeout_s: float, meanwhile: Callable[[], None]) -> socket.socket:
    """A connection, waited for in short turns."""
    connection = socket.socket(socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET)
    try:
        connection.setblocking(False)
        problem = connection.connect_ex((endpoint.host, endpoint.port))
        deadline = time.monotonic() + timeout_s
        answer = select.poll()  # select() refuses what is open beside a thousand other files
        answer.register(connection, select.POLLOUT)
        while problem == errno.EINPROGRESS and time.monotonic() < deadline:
            meanwhile()
            if answer.poll(POLL_S * 1000):
                problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            why = "no answer" if problem == errno.EINPROGRESS else os.strerror(problem)
            raise SlotUnreachableError(f"shard service {endpoint.host}:{endpoint.port}: {why}")
    except BaseException:
        connection.close()
        raise
    return connection
