"""Folders of a run's log lines on this machine's disk: one for each node, and one for the coordinator.

They outlive the processes that write them, and the run. ``learn`` notes whose run they are of: a name may be
used again, and lines of an earlier run are none of the present one. Of nodes that are gone as much is kept
beside a living one as of one node.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from picotron_ray.observability.logs.store import MOST_BYTES, log_files, size_of
from picotron_ray.runtime.ray_cluster.names import event_folder

COORDINATOR = "coordinator"
ALIVE = "alive"
"""File whose time says when a folder's writer was last there."""
ALIVE_S = 60.0
SILENT_S = 600.0
"""Without a sign of its writer for so long a folder counts as a dead node's."""
RUN = "run"
"""File with the identity of the run."""


def log_root(run: str) -> Path:
    """Folder of all of a run's lines on this machine."""
    return event_folder(run).with_name("logs")


def log_folder(run: str, node: str) -> Path:
    """Folder of a node's lines; ``node`` is Ray's id of it, or `COORDINATOR`."""
    return log_root(run) / node[:16]


def learn(folder: Path, identity: str) -> None:
    """Note of which run a folder's lines are. Raises OSError: the disk does not take it."""
    if identity and run_of(folder) != identity:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / RUN).write_text(identity)


def run_of(folder: Path) -> str:
    """Identity of the run whose lines a folder has; empty where it does not know."""
    try:
        return (folder / RUN).read_text()
    except OSError:
        return ""


def sign(folder: Path, now_s: float) -> float:
    """Say that a folder's writer lives; returns when to say it again, by the clock of ``now_s``."""
    with suppress(OSError):
        (folder / ALIVE).touch()
    return now_s + ALIVE_S


def is_living(folder: Path) -> bool:
    """Whether somebody writes to a folder."""
    try:
        return time.time() - (folder / ALIVE).stat().st_mtime < SILENT_S
    except OSError:
        return False


def known_nodes(run: str) -> dict[str, Path]:
    """Folders of this machine with lines of the newest run of that name, by the first part of a node's id.

    Those that know no identity count as of any run: their nodes were never greeted by a coordinator.
    """
    try:
        folders = sorted((path for path in log_root(run).iterdir() if path.is_dir()), key=_written_s)
    except OSError:
        return {}
    identity = next(filter(None, map(run_of, reversed(folders))), "")
    return {folder.name: folder for folder in folders if run_of(folder) in ("", identity)}


def _written_s(folder: Path) -> float:
    return max((path.stat().st_mtime for path in log_files(folder)[-1:]), default=0.0)


def remove_old(run: str, own: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove the oldest folders of nodes that are gone, until the rest of them takes at most so much."""
    with suppress(OSError):
        others = [path for path in log_root(run).iterdir() if path.is_dir() and path != own]
        gone = sorted((path for path in others if not is_living(path)), key=_written_s, reverse=True)
        total = 0
        for folder in gone:
            total += sum(map(size_of, log_files(folder)))
            if total > most_bytes:
                shutil.rmtree(folder, ignore_errors=True)


def output_of(descriptor: int) -> str:
    """Path of the file that this process's stdout or stderr goes to; empty where it is none."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
    return path if path.startswith("/") and os.path.isfile(path) else ""
