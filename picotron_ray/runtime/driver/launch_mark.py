"""Mark of a launch that is under way on this machine, for commands that come before its coordinator is there.

A launch holds a shared lock on a file of the run until its coordinator answers, or until it gave up, and
removes the file then. The lock goes with its process, so a file that a SIGKILL leaves means nothing. Nothing
waits for this lock: who starts Ray is agreed on by another one (``local_ray.locked``).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

from picotron_ray.runtime.ray_cluster.local_ray import state_folder

log = logging.getLogger(__name__)
TRIES, ASKED_S = 3, 0.02


def mark_file(run: str) -> Path:
    """Path of a run's mark; no run's name begins with a dot, so it is no other file of a run."""
    return state_folder() / f".{run}.launch"


@contextlib.contextmanager
def held(run: str) -> Iterator[None]:
    """Mark a launch of the run as under way; where its folder cannot be written nobody hears of it."""
    try:
        state_folder().mkdir(parents=True, exist_ok=True)
        file = open(mark_file(run), "a+", opener=partial(os.open, mode=0o600))  # noqa: SIM115 (held below)
    except OSError as error:
        log.debug("the launch of %s is not marked: %s", run, error)
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):  # on a full disk the lock alone has to do
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        try:
            yield
        finally:
            _remove(file)


def _remove(file: TextIO) -> None:
    """Leave nothing of a launch that ends or has its coordinator, unless another one holds the mark too."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(file.name)
        state_folder().rmdir()  # where nothing else was kept in it: a launch that was refused leaves none


def launcher(run: str) -> int | None:
    """Pid of the process that launches a run just now; None where none does. Asking leaves nothing behind."""
    try:
        file = mark_file(run).open()
    except OSError:
        return None
    with file:
        for _ in range(TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(ASKED_S)  # whoever else asks holds it for a moment
            else:
                return None
        words = file.read().strip()
    return int(words) if words.isdecimal() else 0
