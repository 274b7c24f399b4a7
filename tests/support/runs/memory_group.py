"""A control group of the kernel's that limits the memory of a run under test, and a process that fills it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")
GRAIN = 8 * 2**20
HOG = f"""
import time
held = []
for _ in range({{bytes}} // {GRAIN}):
    held.append(b"x" * {GRAIN})
    time.sleep(0.005)
time.sleep(600)
"""


@dataclass
class MemoryGroup:
    """A control group of version 1 or 2; ``folder`` is below the one that its processes come from."""

    folder: Path
    hogs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def enter(self) -> None:
        """Put this very process into it: for a child between fork and exec."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def version_1(self) -> bool:
        return (self.folder / "memory.limit_in_bytes").exists()

    def used(self) -> int:
        """Bytes that its processes hold, and the pages that the kernel keeps for them."""
        name = "memory.usage_in_bytes" if self.version_1 else "memory.current"
        return int((self.folder / name).read_text())

    def limit(self, most_bytes: int | None) -> None:
        name = "memory.limit_in_bytes" if self.version_1 else "memory.max"
        none = "-1" if self.version_1 else "max"
        (self.folder / name).write_text(none if most_bytes is None else str(most_bytes))

    def kills(self) -> int:
        """Processes in it that the kernel has ended for want of memory."""
        text = (self.folder / ("memory.oom_control" if self.version_1 else "memory.events")).read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    def use_up(self, room_bytes: int) -> None:
        """Leave so much room, and fill it until the kernel ends a process; afterwards there is room again.

        Ray marks its workers as those that the kernel is to end first.
        """
        before = self.kills()
        self.limit(self.used() + room_bytes)
        hog = self.fill(8 * 2**30)  # what the kernel can free otherwise, it frees first
        until(lambda: self.kills() > before, "the kernel ended nothing")
        hog.kill()
        hog.wait()
        self.limit(None)

    def fill(self, size_bytes: int) -> subprocess.Popen[bytes]:
        """Start a process that takes so much memory, and keeps it until it is killed."""
        command = [sys.executable, "-c", HOG.format(bytes=size_bytes)]
        self.hogs.append(subprocess.Popen(command, preexec_fn=self.enter))
        return self.hogs[-1]

    def close(self) -> None:
        for hog in self.hogs:
            hog.kill()
            hog.wait()
        until(lambda: not (self.folder / "cgroup.procs").read_text().strip(), "processes are left")
        self.folder.rmdir()


def memory_group(name: str) -> MemoryGroup:
    """Make a group; skips the test where this machine does not let it."""
    parent = CGROUPS
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory" or (controllers == "" and not (CGROUPS / "memory").exists()):
            parent = CGROUPS / controllers / path.lstrip("/")
    folder = parent / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a control group: {error}")
    group = MemoryGroup(folder)
    if not (group.version_1 or (folder / "memory.max").exists()):
        folder.rmdir()
        pytest.skip("needs the memory controller in a control group of its own")
    return group


def until(reached: Callable[[], bool], otherwise: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
