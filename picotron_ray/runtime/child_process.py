"""Pipes of a child process, and its end."""

from __future__ import annotations

import contextlib
import select
import subprocess


def readable(pipe: int, timeout_s: float) -> bool:
    """Wait until a file descriptor has something to read, or its end; false after ``timeout_s``."""
    return _ready(pipe, select.POLLIN, timeout_s)


def writable(pipe: int, timeout_s: float) -> bool:
    """Wait until a file descriptor takes something, or its reader is gone; false after ``timeout_s``."""
    return _ready(pipe, select.POLLOUT, timeout_s)


def _ready(pipe: int, event: int, timeout_s: float) -> bool:
    wanted = select.poll()  # select() refuses what is open beside a thousand other files
    wanted.register(pipe, event)
    return bool(wanted.poll(timeout_s * 1000))


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process whose input and output are pipes, and reap it."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not written yet cannot be
            pipe.close()
    process.wait()
