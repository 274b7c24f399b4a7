"""Host memory of this node: how much processes here may have, and how often the kernel killed for want of it.

Both are read from the control groups of this process (versions 1 and 2, each with those above it), and from
the machine itself. Source: the Linux kernel's documentation of the memory controllers of both versions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
GRAIN_BYTES = 2**28
"""Shares are rounded down to multiples of this, so that nodes of one kind count as equal."""
PROCESS_BYTES = 2**28
"""What a worker's process takes of the host before it holds a tensor: Python, torch and Ray."""


def host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Memory that processes here may have: the machine's, or the control group's limit; 0: unknown."""
    found = [int(kib) * 1024 for kib in re.findall(r"^MemTotal:\s+(\d+) kB", _text(proc / "meminfo"), re.M)]
    for folder in _groups(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(ValueError):  # "max", or no such file
                found.append(int(_text(folder / name)))
    return min(found, default=0)


def share_of(host: int, workers: int) -> int:
    """Bytes for the tensors of each of so many workers on a node without GPUs; 0: not known.

    >>> share_of(64 * 2**30, 3) / 2**30
    21.0
    """
    if not host:
        return 0
    share = max(1, host // max(1, workers) - PROCESS_BYTES)
    return share // GRAIN_BYTES * GRAIN_BYTES if share >= 4 * GRAIN_BYTES else share


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Processes that the kernel has killed here for want of memory; of the group, else of the machine."""
    counts = [
        int(count)
        for folder in _groups(proc, cgroups)
        for name in ("memory.events", "memory.oom_control")
        for count in re.findall(r"^oom_kill (\d+)", _text(folder / name), re.M)
    ]
    if not counts:
        counts = [int(count) for count in re.findall(r"^oom_kill (\d+)", _text(proc / "vmstat"), re.M)]
    return max(counts, default=0)


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders of this process's memory control groups, and of those above them.

    In a container the path is often the host's, and the folder that is mounted is the group itself.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = cgroups / controllers
            folder = root / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each == root or root in each.parents)


def _text(path: Path) -> str:
    """Content of a file of the kernel's; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
