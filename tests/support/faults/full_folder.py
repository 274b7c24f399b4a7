"""A full memory file system, for code in a process with a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_on_small_disk(folder: Path, code: str, size: str = "20m") -> str:
    """Run Python code where a small memory file system is mounted on ``folder``; returns what it prints.

    The code has ``folder`` and `fill`. Skips the test where mounts are not permitted.
    """
    mount = f"mount -t tmpfs -o size={size} none {folder}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces are not permitted here")
    head = "from pathlib import Path\nfrom tests.support.faults.full_folder import fill\n"
    code = f"{head}folder = Path({str(folder)!r})\n{code}"
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-3000:])
    return done.stdout


def fill(folder: Path) -> Path:
    """Take all the room that a file system has left; returns the file that has it."""
    others = folder / "others"
    file = os.open(others, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(file, bytes(4096))
    except OSError:
        return others
    finally:
        os.close(file)
