"""Telemetry of a worker's steps: its clock, its memory and what it sends, written to its telemetry page.

Reading memory costs more than a step may pay for, so that the last reading serves many steps: the next one
comes after at least ``LEAST_S`` and `SHARE` of its own cost.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from picotron_ray.config.schema.telemetry import AXES
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes
from picotron_ray.runtime.telemetry_page import MemoryFigures, StepRow, TelemetryPage
from picotron_ray.train.step_clock import NoClock, StepTimes, step_clock

LEAST_S = 1.0
SHARE = 1000.0
"""x its cost: time until memory is read again."""
BLOCKS_S = 10.0
"""Least time between two looks at the allocator's blocks, which stop it for a moment."""


class Throttled:
    """A reading that is taken anew only when its cost allows."""

    def __init__(self, read: Callable[[], int | tuple[int, ...]], least_s: float) -> None:
        self._read, self._least_s = read, least_s
        self._next_s = float("-inf")
        self._value: tuple[int, ...] = ()

    def __call__(self) -> tuple[int, ...]:
        """Return the newest reading."""
        now = time.perf_counter()
        if now >= self._next_s:
            value = self._read()
            self._value = value if isinstance(value, tuple) else (value,)
            cost_s = time.perf_counter() - now
            self._next_s = now + max(self._least_s, SHARE * cost_s)
        return self._value


class DeviceMemory:
    """Memory of this process's device since a generation began.

    Args:
        neighbours: workers that share the host's memory, this one included; CPUs only.
    """

    def __init__(self, device: torch.device, neighbours: int) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._device = torch.cuda.get_device_properties(device).total_memory
            self._used = Throttled(lambda: _cuda_bytes(device), LEAST_S)
            self._free = Throttled(lambda: _largest_free(device), BLOCKS_S)
        else:
            with contextlib.suppress(OSError):  # a kernel that does not let it: the process's whole life
                Path("/proc/self/clear_refs").write_text("5")
            self._device = host_bytes() // max(1, neighbours)
            self._used = Throttled(_resident_bytes, LEAST_S)

    def __call__(self) -> MemoryFigures:
        """Return the newest figures, of the last steps."""
        allocated, reserved, peak = self._used()
        (free,) = self._free() if self._cuda else (max(0, self._device - reserved),)
        return MemoryFigures(allocated, reserved, peak, free, self._device)


def _cuda_bytes(device: torch.device) -> tuple[int, ...]:
    """Allocated, reserved, and most allocated, by torch's allocator."""
    stats = torch.cuda.memory_stats(device)
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
    return tuple(int(stats.get(name, 0)) for name in names)


def _largest_free(device: torch.device) -> int:
    """Largest block that the allocator has free, or could still get from the device."""
    blocks = (
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] == "inactive"
    )
    return max(max(blocks, default=0), torch.cuda.mem_get_info(device)[0])


def _resident_bytes() -> tuple[int, ...]:
    """Resident set of this process, twice, and its peak."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return resident, resident, max(resident, int(found[1]) * 1024 if found else 0)


class StepTelemetry:
    """Rows of one generation on a page."""

    def __init__(self, page: TelemetryPage, spec: GenerationSpec, rank: int, device: torch.device) -> None:
        self._page, self._id, self._rank = page, spec.id, rank
        nodes = Counter(member.node for member in spec.members)
        self._memory = DeviceMemory(device, nodes[spec.members[rank].node])
        self._steps = 0

    def __call__(self, times: StepTimes) -> None:
        """Write a row."""
        sent = times.sent_bytes
        row = StepRow(
            count=0,
            term=self._id.term,
            n=self._id.n,
            rank=self._rank,
            step=times.step,
            ordinal=self._steps,
            step_s=times.step_s,
            row_s=times.row_s,
            phase_s=times.phase_s,
            sent_bytes=tuple(float(sent.get(axis, 0)) for axis in AXES),
            stage_s=dict(times.stage_s),
            rows=times.rows,
            micro_batches=times.micro_batches,
            memory=self._memory(),
        )
        self._page.write(row)
        self._steps += 1


def generation_clock(
    page: TelemetryPage | None, spec: GenerationSpec, rank: int, device: torch.device
) -> NoClock:
    """Return the clock of a generation's steps, which writes to ``page``; None: nothing is measured."""
    if page is None:
        return NoClock()
    stages = spec.layout.rank_stages(spec.layout.coordinates(rank).pp)
    return step_clock(StepTelemetry(page, spec, rank, device), stages, device)


def make_page(
    folder: Path, worker: str, device: torch.device, interval_s: float | None
) -> TelemetryPage | None:
    """Make a worker's page; None where steps are not measured.

    Raises:
        SlotRoomError: there is no room for it.
    """
    if interval_s is None:
        return None
    gpu = ""
    if device.type == "cuda":
        gpu = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
    return TelemetryPage(folder / f"{worker}.telemetry", gpu)
