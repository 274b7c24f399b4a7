"""The leader of a local Ray's session: runs Ray's head and takes everything down when the run is over.

``python -m picotron_ray.runtime.ray_cluster.supervisor RUN ENDED STARTER COMMAND…``. It imports neither Ray
nor torch. It ends when Ray's head ends, on SIGTERM, once the file ENDED has existed for ``LINGER_S`` (drivers
that are attached read the run's result meanwhile), or when the process STARTER, its parent, is gone before
there was anything to run, and leaves no process, slot folder or state file behind.
A state file that is deleted meanwhile it writes again: by that alone other commands find the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from picotron_ray.errors import PicotronError
from picotron_ray.runtime.ray_cluster import local_ray, processes
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay

LINGER_S = 10.0
POLL_S = 0.2
KEEP_S = 5.0


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


class StateKeeper:
    """Keeper of the state file of the Ray with a mark."""

    def __init__(self, run: str, mark: str) -> None:
        self._run, self._mark = run, mark
        self._seen: LocalRay | None = None
        self._look_at = 0.0

    def look(self, now: float) -> None:
        """Remember the file each ``KEEP_S``, or write it again where it is gone; passes over what fails."""
        if now < self._look_at:
            return
        self._look_at = now + KEEP_S
        with suppress(OSError, PicotronError):
            found = local_ray.find(self._run)
            if found is not None and found.mark == self._mark:
                self._seen = found
            elif found is None and self._seen is not None:
                with local_ray.locked(self._run):
                    if local_ray.find(self._run) is None:
                        local_ray.save(self._seen)


def _wait(head: subprocess.Popen[bytes], ended: Path, starter: int, keeper: StateKeeper) -> None:
    begun, path = False, local_ray.begun_file(ended.parent)
    while head.poll() is None:
        orphaned = os.getppid() != starter  # looked at first: it may tell of the begin, then end
        begun = begun or path.exists()  # kept: cleaners of temporary files take files that nobody changes
        if orphaned and not begun:
            return
        if ended.exists() and time.time() - ended.stat().st_mtime > LINGER_S:
            return
        if not ended.exists():
            keeper.look(time.monotonic())
        time.sleep(POLL_S)


def _tell(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    with suppress(OSError):
        temporary.write_text(text)
        temporary.rename(path)


def main(run: str, ended: str, starter: int, command: list[str]) -> int:
    signal.signal(signal.SIGTERM, _terminate)
    mark = os.environ[processes.MARK]
    head = subprocess.Popen(command)
    try:
        _wait(head, Path(ended), starter, StateKeeper(run, mark))
    except _Terminated:
        # Whoever sent it (``local_ray.stop``) holds the lock and removes the folders and the state file.
        _end(head, mark)
        return head.wait()
    if (code := head.poll()) is not None:  # told first: a driver that starts this Ray has the lock and waits
        _tell(local_ray.exit_file(Path(ended).parent), str(code))
    with local_ray.locked(run):
        _end(head, mark)
        state = local_ray.find(run)
        if state is not None and state.mark == mark:
            local_ray.stop(state, grace_s=0.0)
    return head.wait()


def _end(head: subprocess.Popen[bytes], mark: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if head.poll() is None:
        head.terminate()
    processes.end_all(mark, os.getpid(), grace_s=2.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
