"""TensorBoard event files, scalars only.

The format is small, and libraries that write it import torch.

A coordinator without torch starts a second sooner and stays 250 MB smaller. A file is a sequence of records
(length, its checksum, data, its checksum; TensorFlow's ``record_writer.cc``), each holding an ``Event``
(TensorFlow's ``event.proto``): the version first, then a session's start, which makes TensorBoard hide what
other files of the folder say of that step and later ones, then scalars.
"""

from __future__ import annotations

import ctypes
import struct
import time
from pathlib import Path

_VERSION = b"brain.Event:2"
_SESSION_START = b"\x08\x01"  # SessionLog { status: START }


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli; RFC 3720, B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    """Frame data as one record of the file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, data: bytes) -> bytes:
    """Encode a length-delimited field of a protocol buffer."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def event(at_s: float, step: int, content: bytes) -> bytes:
    """Encode an ``Event``: wall_time = 1, step = 2, and its content's field."""
    return b"\x09" + struct.pack("<d", at_s) + b"\x10" + _varint(step) + content


def scalars(figures: dict[str, float]) -> bytes:
    """Encode the field ``summary`` = 5 with a value (tag = 1, simple_value = 2) for each figure."""
    values = (
        _field(1, tag.encode()) + b"\x15" + struct.pack("<f", _single(value))
        for tag, value in figures.items()
    )
    return _field(5, b"".join(_field(1, value) for value in values))


def _single(value: float) -> float:
    """Round to single precision, as the format has it; larger values become infinite."""
    return ctypes.c_float(value).value


class EventFile:
    """Event file, appended to until ``close``."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Create a file; what other files of the folder say of ``first_step`` and later steps is void."""
        now = time.time()
        self._file = (folder / f"events.out.tfevents.{time.time_ns()}.picotron_ray").open("xb")
        self._file.write(record(event(now, 0, _field(3, _VERSION))))
        self._file.write(record(event(now, first_step, _field(7, _SESSION_START))))
        self._file.flush()

    def add(self, step: int, figures: dict[str, float], at_s: float | None) -> None:
        """Add the scalars of a step; ``at_s`` None: now."""
        self._file.write(record(event(time.time() if at_s is None else at_s, step, scalars(figures))))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
