"""Finding and ending the processes of one local Ray, and nobody else's.

Every process of a local Ray inherits an environment variable with a value drawn for that Ray, and stays
in the session that it was started in. Both survive the death of any parent, so what a SIGKILL of
everything left behind can still be told from a stranger's processes. A process is signalled through a
pidfd that was checked after opening, so a reused pid is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "PICOTRON_LOCAL_RAY"
"""Environment variable that marks the processes of a local Ray."""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty where the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in ("Z", "X") else fields


def started(pid: int) -> str:
    """When a process began, in its machine's ticks; "" where it is gone, a zombie or hidden."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def lives(pid: int, began: str) -> bool:
    """Whether the process of that id that `started` then lives, also where it is hidden from this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return started(pid) == began or not Path(f"/proc/{pid}").exists()


def _environment_has(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def is_member(pid: int, mark: str, session: int) -> bool:
    """True for a living process of the local Ray of that mark and session."""
    fields = _stat(pid)
    if not fields or pid == os.getpid():
        return False
    if _environment_has(pid, mark):
        return True
    # A process title can overwrite the environment; the session then tells, unless its number was
    # reused: while the leader lives, it must itself carry the mark.
    leader_is_stranger = bool(_stat(session)) and not _environment_has(session, mark)
    return int(fields[3]) == session and not leader_is_stranger


def members(mark: str, session: int) -> list[int]:
    """Pids of all living processes of that local Ray, the calling process excluded."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if is_member(pid, mark, session)]


def send(pid: int, mark: str, session: int, number: signal.Signals) -> None:
    """Signal one process if it is (still) a member."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # it may end in between, which is what was wanted
        with contextlib.suppress(ProcessLookupError):
            if is_member(pid, mark, session):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def end_all(mark: str, session: int, grace_s: float) -> list[int]:
    """End every member: SIGTERM to the session's leader, SIGKILL to whatever is left after ``grace_s``.

    Returns the pids that are still alive 5 s after SIGKILL (uninterruptible in the kernel), if any.
    """
    send(session, mark, session, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while members(mark, session) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + 5.0
    while (left := members(mark, session)) and time.monotonic() < deadline:
        for pid in left:
            send(pid, mark, session, signal.SIGKILL)
        time.sleep(0.05)
    return left
