"""Testimony of a worker that hangs, in its node's folder: stacks, and the newest collectives.

A signal makes `faulthandler` write the Python stack of every thread, from within the signal's handler: it
needs neither the GIL nor the interpreter's loop, so a deadlocked worker answers too. A byte in a pipe makes a
thread write torch's flight recorder, where it records (NCCL). That takes the GIL, which collectives that wait
have released.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
from pathlib import Path

SIGNAL = signal.SIGUSR1
STACKS, ASK, COLLECTIVES = ".stacks", ".ask", ".collectives"
"""Suffixes of a worker's files: what the signal writes, the pipe that is asked, what it is answered in."""
NEWEST = 200
"""Of them, those that are told."""


def testify(folder: Path, worker: str) -> None:
    """Make this process answer; to be called before its heartbeat page exists, which lets others ask."""
    stacks = os.open(folder / (worker + STACKS), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
    pipe = folder / (worker + ASK)
    os.mkfifo(pipe, 0o600)
    answer = folder / (worker + COLLECTIVES)
    threading.Thread(target=_answer, args=(pipe, answer), name="testimony", daemon=True).start()


def _answer(pipe: Path, target: Path) -> None:
    asked = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)  # for writing too: it never ends
    while os.read(asked, 64):
        temporary = target.with_name(target.name + ".new")
        temporary.write_bytes(newest_collectives())
        temporary.rename(target)


def newest_collectives() -> bytes:
    """Return what torch's flight recorder holds, in JSON; no entries where it records nothing."""
    import torch._C._distributed_c10d as c10d

    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # builds with NCCL have the first
    dump = next(getattr(c10d, name) for name in names if hasattr(c10d, name))
    found = json.loads(dump())
    found["entries"] = found.get("entries", [])[-NEWEST:]
    return json.dumps(found, separators=(",", ":")).encode()
