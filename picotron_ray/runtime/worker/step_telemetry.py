"""Telemetry of a worker's steps: its clock, its memory and what it sends, written to its telemetry page.

Reading memory costs more than a step may pay for, so that the last reading serves many steps: the next one
comes after at least ``LEAST_S`` and `SHARE` of its own cost in processor time. A busy machine stretches
seconds, and a leak is to be seen there too.
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

from picotron_ray.comm.abortable_wait import listen
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes
from picotron_ray.runtime.telemetry_page import NO_MEMORY, MemoryFigures, StepRow, TelemetryPage
from picotron_ray.runtime.worker.memory_reading import HeldMemory
from picotron_ray.train.step_clock import NoClock, StepTimes, sees_waits, step_clock

LEAST_S = 1.0
SHARE = 1000.0
"""x its cost: time until memory is read again."""
BLOCKS_S = 10.0
"""Least time between two looks at the allocator's blocks, which stop it for a moment."""


Limited = Callable[[], HeldMemory | None]


def unlimited() -> None:
    """Know no limit."""


class DeviceMemory:
    """Memory of this process's device since a generation began.

    Args:
        neighbours: workers that share the host's memory, this one included; CPUs only.
        limited: reads it against a limit of this worker's own; None where it has none.
    """

    def __init__(self, device: torch.device, neighbours: int, limited: Limited = unlimited) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._limited = limited
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._total = torch.cuda.get_device_properties(device).total_memory
        else:
            with contextlib.suppress(OSError):  # a kernel that does not let it: the process's whole life
                Path("/proc/self/clear_refs").write_text("5")
            self._total = host_bytes() // max(1, neighbours)
        self._next_s = self._blocks_s = float("-inf")
        self._largest_free = 0
        self._newest = NO_MEMORY

    def __call__(self) -> MemoryFigures:
        """Return the newest figures, of the last steps."""
        now = time.perf_counter()
        if now >= self._next_s:
            began = time.thread_time()
            self._newest = self._read(now)
            self._next_s = now + max(LEAST_S, SHARE * (time.thread_time() - began))
        return self._newest

    def _read(self, now: float) -> MemoryFigures:
        if (own := self._limited()) is not None:
            free = max(0, own.device - own.peak)
            return MemoryFigures(own.allocated, own.reserved, own.peak, free, own.device)
        if not self._cuda:
            allocated, reserved, peak = _resident_bytes()
            return MemoryFigures(allocated, reserved, peak, max(0, self._total - reserved), self._total)
        if now >= self._blocks_s:
            began = time.thread_time()
            self._largest_free = _largest_free(self._device)
            self._blocks_s = now + max(BLOCKS_S, SHARE * (time.thread_time() - began))
        return MemoryFigures(*_cuda_bytes(self._device), self._largest_free, self._total)


def _cuda_bytes(device: torch.device) -> tuple[int, int, int]:
    """Allocated, reserved, and most allocated, by torch's allocator."""
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = (stats.get(f"{name}_bytes.all.current", 0) for name in ("allocated", "reserved"))
    return allocated, reserved, stats.get("allocated_bytes.all.peak", 0)


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


def _resident_bytes() -> tuple[int, int, int]:
    """Resident set of this process, twice, and its peak."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return resident, resident, max(resident, int(found[1]) * 1024 if found else 0)


class StepTelemetry:
    """Rows of one generation on a page."""

    def __init__(
        self,
        page: TelemetryPage,
        spec: GenerationSpec,
        rank: int,
        device: torch.device,
        limited: Limited = unlimited,
    ) -> None:
        self._page, self._id, self._rank = page, spec.id, rank
        nodes = Counter(member.node for member in spec.members)
        self._memory = DeviceMemory(device, nodes[spec.members[rank].node], limited)
        self._first = spec.resume_step + 1
        self._waits_seen = sees_waits(spec.layout, device)

    def __call__(self, times: StepTimes) -> None:
        """Write a row."""
        row = StepRow(
            row=0,
            term=self._id.term,
            n=self._id.n,
            rank=self._rank,
            step=times.step,
            ordinal=times.step - self._first,
            step_s=times.step_s,
            row_s=times.row_s,
            phase_s=times.phase_s,
            sent_bytes=times.sent_bytes,
            stage_s=times.stage_s,
            rows=times.fed.rows,
            micro_batches=times.fed.micro_batches,
            memory=self._memory(),
            waits_seen=self._waits_seen,
            links=(*(link.latency_s for link in times.links), *(link.bytes_per_s for link in times.links)),
        )
        self._page.write(row)


def generation_clock(
    page: TelemetryPage | None,
    spec: GenerationSpec,
    rank: int,
    device: torch.device,
    limited: Limited = unlimited,
) -> NoClock:
    """Return the clock of a generation's steps, which writes to ``page``; None: nothing is measured.

    Args:
        limited: as of `DeviceMemory`.
    """
    if page is None:
        return NoClock()
    layout = spec.layout
    stages = layout.rank_stages(layout.coordinates(rank).pp) if layout.pp > 1 else None
    clock = step_clock(StepTelemetry(page, spec, rank, device, limited), stages, device)
    listen(clock.waits)
    return clock


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
