"""Want of open files, as a process at its limit meets it; and many, as a coordinator of many nodes has."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FD_SETSIZE = 1024


@contextmanager
def no_open_files() -> Iterator[None]:
    """Leave this process no file descriptor meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 16, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


@contextmanager
def a_thousand_open_files() -> Iterator[None]:
    """Hold every file descriptor that select() takes, meanwhile."""
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < FD_SETSIZE:
            held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
