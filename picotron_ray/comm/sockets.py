"""Sockets of a generation's process groups: finding them, and shutting them.

gloo has no working abort: ``backend.abort()`` returns and releases nothing. But a collective raises at once
when its connections are shut down. There are two traps, both measured:

- Shutting a *listening* socket makes gloo's listener thread terminate the process.
- A set of sockets found by before/after difference can hold a connection that another thread (Ray's gRPC)
  opened in between.

So a connection is shut only if it is connected, and one of its ends is an address on which a gloo device of
the generation listens.

Only the reading side is shut. gloo forgets to wake the waiter of a send whose inline write fails
(``Pair::sendAsyncMode``: the operation is not queued yet when the error goes round). A send that starts after
SHUT_RDWR, before gloo's own thread has seen the end of the stream, waits for its whole timeout: 1 abort in
50, measured. With SHUT_RD writes go on working until that thread closes the pair.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

Address = tuple[str, int]


class SocketInfo(NamedTuple):
    """TCP socket of this process. ``inode`` identifies it for as long as it is open."""

    fd: int
    inode: str
    listening: bool
    local: Address
    peer: Address | None


def _plain(address: tuple[str | int, ...]) -> Address:
    """Host and port without IPv6 flow and scope; an IPv4-mapped host as plain IPv4."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _inspect(fd: int) -> SocketInfo | None:
    """The socket of ``fd``; None where it is no TCP socket or was closed meanwhile."""
    try:
        link = os.readlink(f"/proc/self/fd/{fd}")
        if not link.startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(fd)) as probe:
            if probe.family not in (socket.AF_INET, socket.AF_INET6) or probe.type != socket.SOCK_STREAM:
                return None
            listening = bool(probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            peer: Address | None = None
            with contextlib.suppress(OSError):  # not connected
                peer = _plain(probe.getpeername())
            return SocketInfo(fd, link, listening, _plain(probe.getsockname()), peer)
    except OSError:
        return None


def tcp_sockets() -> Iterator[SocketInfo]:
    """Every TCP socket that this process has open right now."""
    for entry in os.listdir("/proc/self/fd"):
        info = _inspect(int(entry))
        if info is not None:
            yield info


def shut_connections(wanted: Callable[[SocketInfo], bool], how: int = socket.SHUT_RD) -> int:
    """Shut every *connected* socket that ``wanted`` picks for reading; return how many."""
    count = 0
    for info in tcp_sockets():
        if info.listening or info.peer is None or not wanted(info):
            continue
        try:
            with socket.socket(fileno=os.dup(info.fd)) as probe:
                # The number may have been closed and reused since it was inspected.
                if os.readlink(f"/proc/self/fd/{info.fd}") == info.inode:
                    probe.shutdown(how)
                    count += 1
        except OSError:
            continue  # its other end, or its owner, was faster
    return count
