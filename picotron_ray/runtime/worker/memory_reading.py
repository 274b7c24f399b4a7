"""Read what a worker's device holds, and release what its allocator has cached.

On CUDA both are torch's allocator. On a CPU it is the C library's: what it holds of the machine and what of
that is in use (``mallinfo2``), the process's highest resident set, and ``malloc_trim``. A worker that may
only take so much (``cluster.worker_memory_bytes``) counts by what the kernel counts against its limit,
without what the C library has free of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes in use, reserved, most that was held, of the whole device (0: not known), and of fragments.

    Fragments are what is reserved beyond the tensors where they were most; of a CPU, whose most is not known,
    beyond those of now.
    """

    allocated: int
    reserved: int
    peak: int
    device: int
    fragments: int = 0


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and newer."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def held_memory(device: torch.device, share_bytes: int, limit_bytes: int | None) -> HeldMemory:
    """Read the memory of this process.

    Args:
        share_bytes: of the host's memory, of a worker on CPUs.
        limit_bytes: that the kernel lets the worker take, where that is in force.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        allocated, reserved = (
            int(stats.get(f"{name}_bytes.all.current", 0)) for name in ("allocated", "reserved")
        )
        most = int(stats.get("allocated_bytes.all.peak", 0))
        return HeldMemory(allocated, reserved, most, total, max(0, reserved - most))
    status = Path("/proc/self/status").read_text()
    allocated, reserved = _malloc(status)
    free = max(0, reserved - allocated)
    if limit_bytes:
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        mapped = limit_bytes - (soft - _status(status, "VmData"))
        in_use = max(0, mapped - free)  # what is free is used again
        return HeldMemory(allocated, reserved, in_use, limit_bytes, free)
    return HeldMemory(allocated, reserved, _status(status, "VmHWM"), share_bytes, free)


def _malloc(status: str) -> tuple[int, int]:
    """Bytes in use and held by the C library; the resident set for both where it does not say."""
    with contextlib.suppress(AttributeError):
        mallinfo = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _MallInfo
        info = mallinfo()
        return info.uordblks + info.hblkhd, info.arena + info.hblkhd
    resident = _status(status, "VmRSS")
    return resident, resident


def _status(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def release_cached(device: torch.device) -> None:
    """Give back what the allocator holds and nobody uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(AttributeError):  # a libc other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def collect(device: torch.device) -> None:
    """Collect garbage, then release."""
    gc.collect()
    release_cached(device)
