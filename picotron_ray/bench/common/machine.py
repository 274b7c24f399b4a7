"""Machine that a figure was measured on."""

from __future__ import annotations

import os
from pathlib import Path


def machine() -> dict[str, str | int | float]:
    """Describe the processor, the cores that this process may use, and the memory in GiB."""
    info = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{os.uname().sysname} {os.uname().release}",
    }


def versions() -> dict[str, str]:
    """List the versions of those compared packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("picotron-ray", "torch", "ray", "torchft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
