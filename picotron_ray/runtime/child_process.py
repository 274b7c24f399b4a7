"""End of a child process that talks through pipes."""

from __future__ import annotations

import contextlib
import subprocess


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process whose input and output are pipes, and reap it."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not written yet cannot be
            pipe.close()
    process.wait()
