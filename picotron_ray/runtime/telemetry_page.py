"""Telemetry page: figures of a worker's last steps, in a file beside its heartbeat page.

The worker writes a row per step; its node's agent reads them without asking it. A row is one copy into
mapped memory, and carries a check sum: one that was read half written, or is garbage, counts as absent. The
oldest of `ROWS` rows is written over. Rows name their generation, so that those of an earlier one are told
apart.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from picotron_ray.config.schema.telemetry import AXES, STEP_PHASES
from picotron_ray.runtime.heartbeat import WANT, allocate, process_start_ticks

SUFFIX = ".telemetry"
ROWS = 100
MOST_STAGES = 32
"""Pipeline stages of one rank whose seconds a row holds; of a rank with more, those of the first ones."""
MAGIC = 0x7069636F74726F32
VERSION = 3
_HEADER = struct.Struct("=qqqq48s")  # magic, version, pid, start ticks, UUID of the GPU
_HEAD_BYTES = 256
_INTEGERS = 9 + 5 + len(AXES) + 1
_DOUBLES = 2 + len(STEP_PHASES) + 2 * len(AXES)
_ROW = struct.Struct(f"={_INTEGERS}q{_DOUBLES}d")  # followed by numbers and seconds of stages
_STAGES = [struct.Struct(f"={count}q{count}d") for count in range(MOST_STAGES + 1)]
_SUM = struct.Struct("=q")  # before all that
ROW_BYTES = -(-(_SUM.size + _ROW.size + _STAGES[-1].size) // 64) * 64
SIZE = _HEAD_BYTES + ROWS * ROW_BYTES


class MemoryFigures(NamedTuple):
    """Memory of a worker's device, in bytes; of a CPU its process's resident set. 0: not known.

    Fields:
        allocated: in tensors.
        reserved: held by the allocator.
        peak: most that was allocated since the generation began.
        largest_free: largest block that could be had without giving back others.
        device: memory of the device, or the worker's share of its host's.
    """

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    largest_free: int = 0
    device: int = 0


NO_MEMORY = MemoryFigures()


class StepRow(NamedTuple):
    """One step of one worker, as the page has it; seconds and bytes as of `train.step_clock.StepTimes`.

    Fields:
        row: number of the row among all that the process has written, from 1.
        ordinal: number of the step within its generation, from 0.
        row_s: seconds per row that is computed, those that only fill micro-batches among them.
        stage_s: by pipeline stage of the rank, seconds per micro-batch.
        sent_bytes: by `AXES`.
        waits_seen: whether what passes wait for is told from what they compute.
        links: latencies by `AXES` in seconds, then bandwidths in bytes per second; 0: not measured.
    """

    row: int
    term: int
    n: int
    rank: int
    step: int
    ordinal: int
    step_s: float
    row_s: float
    phase_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    stage_s: Mapping[int, float]
    rows: int
    micro_batches: int
    memory: MemoryFigures
    waits_seen: bool = True
    links: tuple[float, ...] = (0.0,) * (2 * len(AXES))


@dataclass(frozen=True, slots=True)
class PageRows:
    """One reading of a page.

    Fields:
        rows: whole ones of the newest generation, by step; empty where it has finished none.
        gpu: UUID of the worker's GPU; empty: none.
    """

    worker: str
    pid: int
    start_ticks: int
    gpu: str
    rows: tuple[StepRow, ...]


class TelemetryPage:
    """Writer's side of a page."""

    def __init__(self, path: Path, gpu: str = "") -> None:
        """Make the file.

        Args:
            gpu: UUID of the worker's GPU; empty: it has none.

        Raises:
            SlotRoomError: its file system is full.
        """
        temporary = path.with_suffix(".new-telemetry")
        create = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, create, 0o600), "wb+") as file:
            allocate(temporary, path, file.fileno(), SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        pid = os.getpid()
        known = (MAGIC, VERSION, pid, process_start_ticks(pid), gpu.encode()[:48])
        self._map[: _HEADER.size] = _HEADER.pack(*known)
        self._count = 0
        temporary.rename(path)

    @property
    def count(self) -> int:
        """Rows written until now."""
        return self._count

    def write(self, row: StepRow) -> None:
        """Write a row over the oldest one; its ``row`` is the page's own."""
        self._count += 1
        memory, stage_s = row.memory, row.stage_s
        if len(stage_s) > MOST_STAGES:
            stage_s = {stage: stage_s[stage] for stage in sorted(stage_s)[:MOST_STAGES]}
        packed = _ROW.pack(
            *(self._count, row.term, row.n, row.rank, row.step, row.ordinal, row.rows, row.micro_batches),
            int(row.waits_seen),
            *(memory.allocated, memory.reserved, memory.peak, memory.largest_free, memory.device),
            *row.sent_bytes,
            len(stage_s),
            *(row.step_s, row.row_s),
            *row.phase_s,
            *row.links,
        ) + _STAGES[len(stage_s)].pack(*stage_s, *stage_s.values())
        at = _HEAD_BYTES + (self._count - 1) % ROWS * ROW_BYTES
        self._map[at : at + _SUM.size + len(packed)] = _SUM.pack(zlib.crc32(packed)) + packed


def read_rows(path: Path) -> PageRows | None:
    """Read a worker's page; None where it is absent, not yet complete, or no such page.

    Raises:
        OSError: this process cannot tell, for want of open files.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        if error.errno in WANT:
            raise
        return None
    if len(raw) != SIZE:
        return None
    magic, version, pid, start_ticks, gpu = _HEADER.unpack_from(raw)
    if (magic, version) != (MAGIC, VERSION):
        return None
    whole = [row for place in range(ROWS) if (row := _read_row(raw, place)) is not None]
    newest = max(((row.term, row.n) for row in whole), default=None)
    rows = sorted((row for row in whole if (row.term, row.n) == newest), key=lambda row: row.row)
    name = gpu.rstrip(b"\0").decode(errors="replace")
    return PageRows(path.stem, pid, start_ticks, name, tuple(rows))


def _read_row(raw: bytes, place: int) -> StepRow | None:
    """Read one row; None where there is none, or not a whole one."""
    at = _HEAD_BYTES + place * ROW_BYTES
    (check,) = _SUM.unpack_from(raw, at)
    at += _SUM.size
    values = _ROW.unpack_from(raw, at)
    integers, seconds = values[:_INTEGERS], values[_INTEGERS:]
    count, stages = integers[0], integers[-1]
    if not count or (count - 1) % ROWS != place or not 0 <= stages <= MOST_STAGES:
        return None
    staged = _STAGES[stages]
    if check != zlib.crc32(raw[at : at + _ROW.size + staged.size]):
        return None
    found = staged.unpack_from(raw, at + _ROW.size)
    if not all(map(math.isfinite, (*seconds, *found))):
        return None
    _, term, n, rank, step, ordinal, rows, micro_batches, waits_seen = integers[:9]
    return StepRow(
        row=count,
        term=term,
        n=n,
        rank=rank,
        step=step,
        ordinal=ordinal,
        step_s=seconds[0],
        row_s=seconds[1],
        phase_s=seconds[2 : 2 + len(STEP_PHASES)],
        sent_bytes=integers[14:-1],
        stage_s=dict(zip(found[:stages], found[stages:], strict=True)),
        rows=rows,
        micro_batches=micro_batches,
        memory=MemoryFigures(*integers[9:14]),
        waits_seen=bool(waits_seen),
        links=seconds[2 + len(STEP_PHASES) :],
    )
