"""Testimony of a worker that hangs, in its node's folder: stacks, and the newest operations.

A signal makes `faulthandler` write the Python stack of every thread, from within the signal's handler: it
needs neither the GIL nor the interpreter's loop, so a deadlocked worker answers too. A byte in a pipe makes a
thread write the newest operations, and the counters of its connections. That takes the GIL, which operations
that wait have released.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

SIGNAL = signal.SIGUSR1
STACKS, ASK, COLLECTIVES = ".stacks", ".ask", ".collectives"
"""Suffixes of a worker's files: what the signal writes, the pipe that is asked, what it is answered in."""


def testify(folder: Path, worker: str) -> None:
    """Make this process answer; to be called before its heartbeat page exists, which lets others ask."""
    # here, since agents import this module and do without torch
    from picotron_ray.runtime.worker.newest_operations import newest_operations

    stacks = os.open(folder / (worker + STACKS), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
    pipe = folder / (worker + ASK)
    os.mkfifo(pipe, 0o600)
    answer = folder / (worker + COLLECTIVES)
    answers = (pipe, answer, newest_operations)
    threading.Thread(target=_answer, args=answers, name="testimony", daemon=True).start()


def _answer(pipe: Path, target: Path, newest: Callable[[bool], bytes]) -> None:
    asked = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)  # for writing too: it never ends
    read = False  # whether torch has read frames in this process: the first time takes seconds
    while os.read(asked, 64):
        for places in (False, True)[read:]:
            temporary = target.with_name(target.name + ".new")
            temporary.write_bytes(newest(places))
            temporary.rename(target)
        read = True
