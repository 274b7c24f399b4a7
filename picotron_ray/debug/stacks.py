"""Python stacks as `faulthandler` writes them: which thread trains, where it is, whether it waits there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_PACKAGE = "/picotron_ray/"
_TRAINS = ("/picotron_ray/runtime/worker/generation.py", "/picotron_ray/train/loop.py")
"""Files whose frames tell the thread that trains from the others of a worker."""
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python", "/lib64/python")
_WAITS = ("/torch/distributed/", "/picotron_ray/comm/abortable_wait.py")
_BETWEEN = ("/picotron_ray/comm/abortable_wait.py", "/picotron_ray/comm/operation_record.py")
"""Files of this package that stand between whoever communicates and torch."""


class StackFrame(NamedTuple):
    """A frame: its file, line and function."""

    file: str
    line: int
    function: str

    @property
    def own(self) -> bool:
        """Whether it is a frame of this package or of the user, and of no library."""
        if any(part in self.file for part in _BETWEEN) or self.file.startswith("<"):
            return False
        return _PACKAGE in self.file or not any(part in self.file for part in _LIBRARY)

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line} in {self.function}"


def short(file: str) -> str:
    """Return a file's path from this package on; other paths as they are.

    >>> short("/opt/lib/python3.11/site-packages/picotron_ray/train/loop.py"), short("/home/me/own.py")
    ('picotron_ray/train/loop.py', '/home/me/own.py')
    """
    before, found, rest = file.rpartition(_PACKAGE)
    return found[1:] + rest if before and found else file


def threads(text: str) -> list[tuple[StackFrame, ...]]:
    """Read the stacks of a process, innermost frame first; the thread that was asked comes last."""
    found: list[list[StackFrame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif found and (frame := _FRAME.match(line)):
            found[-1].append(StackFrame(frame[1], int(frame[2]), frame[3]))
    return [tuple(frames) for frames in found]


def training_thread(text: str) -> tuple[StackFrame, ...]:
    """Return the stack of the thread that trains, of a worker; of another process that of its main thread."""
    found = threads(text)
    for frames in found:
        if any(frame.file.endswith(part) for frame in frames for part in _TRAINS):
            return frames
    return found[-1] if found else ()


def place_of(frames: Sequence[StackFrame]) -> str:
    """Return the innermost place that is of this package or of the user; empty: there is none."""
    return str(next((frame for frame in frames if frame.own), ""))


def waits(frames: Sequence[StackFrame]) -> bool:
    """Whether a stack waits for an operation: torch's communication lies within its innermost own frame."""
    for frame in frames:
        if any(part in frame.file for part in _WAITS):
            return True
        if frame.own:
            return False
    return False
