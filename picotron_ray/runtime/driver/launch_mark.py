"""Mark of a launch that is under way on this machine, for commands that come before its coordinator is there.

A launch holds a shared lock on a file of the run until its coordinator answers, or until it gave up. The lock
goes with its process, so the file that a SIGKILL leaves means nothing. Nothing waits for this lock: who
starts Ray is agreed on by another one (``local_ray.locked``).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

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
        file = os.fdopen(os.open(mark_file(run), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        log.debug("the launch of %s is not marked: %s", run, error)
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


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
