"""Turns of a node's workers at what one of them does at a time, told by a lock of their slots' folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05


@contextmanager
def folder_turn(folder: Path, stopped: Callable[[], bool], limit_s: float) -> Iterator[bool]:
    """Hold the folder's lock (``flock``) inside, where it yields True.

    It leaves no file behind, and whatever ends the process releases it. It yields False where ``stopped``,
    which is asked again and again, said True, or another worker has held it for longer than ``limit_s`` s.

    Raises:
        OSError: the folder is gone, or its file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ours = _taken(descriptor, stopped, limit_s)
        try:
            yield ours
        finally:
            if ours:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has it too
    finally:
        os.close(descriptor)


def _taken(descriptor: int, stopped: Callable[[], bool], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not stopped():
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        else:
            return True
    return False
