"""Counters of this process's connections, as its kernel keeps them (``TCP_INFO``, linux/tcp.h)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from picotron_ray.comm.sockets import Address, SocketInfo, tcp_sockets

MOST_CONNECTIONS = 64
"""Of one process that are told: those that look worst."""
_INFO = struct.Struct("=8B24I4Q")
_RETRANSMITS, _UNACKED, _LAST_RECEIVED, _RTT, _TOTAL = 2, 8 + 4, 8 + 11, 8 + 15, 8 + 23
_RECEIVED = 8 + 24 + 3
_SENT_AT = 200
"""Places in the structure; the last one in bytes, which kernels before 4.19 do not have."""


def link_counters(wanted: Callable[[SocketInfo], bool]) -> list[dict[str, Any]]:
    """Read the counters of every connection that ``wanted`` picks, those with unanswered data first."""
    found = []
    for info in tcp_sockets():
        if info.listening or info.peer is None or not wanted(info):
            continue
        try:
            with socket.socket(fileno=os.dup(info.fd)) as probe:
                raw = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # closed meanwhile
        if len(raw) >= _INFO.size:
            found.append({"local": _text(info.local), "peer": _text(info.peer), **_counters(raw)})
    found.sort(key=lambda one: (-one["retransmits"], -one["unacked"], -one["retransmitted"]))
    return found[:MOST_CONNECTIONS]


def _counters(raw: bytes) -> dict[str, Any]:
    values = _INFO.unpack(raw[: _INFO.size])
    sent = struct.unpack_from("=Q", raw, _SENT_AT)[0] if len(raw) >= _SENT_AT + 8 else 0
    return {
        "unacked": values[_UNACKED],
        "retransmits": values[_RETRANSMITS],
        "retransmitted": values[_TOTAL],
        "sent_bytes": sent,
        "received_bytes": values[_RECEIVED],
        "last_received_s": values[_LAST_RECEIVED] / 1e3,
        "rtt_s": values[_RTT] / 1e6,
    }


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
