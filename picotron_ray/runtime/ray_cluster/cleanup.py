"""Removing what a SIGKILL of everything left of a run on this machine: processes, slots, pages.

On a local Ray the next launch (or ``stop``) clears the run's whole folder in the memory file system, once no
process writes a page there: a living one that is not of our dead Ray belongs to somebody else's run of the
same name, which is refused rather than disturbed. On a given cluster each agent signs its node's folder
and removes those beside it whose agent and workers are dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.heartbeat import process_alive, process_start_ticks, read_page
from picotron_ray.runtime.ray_cluster import kept_slots, local_ray, private_folder, reserved_room
from picotron_ray.runtime.ray_cluster.connect import run_folders
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay

log = logging.getLogger(__name__)


def clear(job: JobConfig, dead: LocalRay | None) -> None:
    """Remove everything that an earlier, dead local Ray of this run left, but slots that it keeps.

    Raises:
        ConfigError: living workers of another Ray use the run's folder.
    """
    if dead is not None:
        local_ray.stop(dead, grace_s=0.0)
    for folder in run_folders(job):
        if (why := private_folder.problem(folder.parent)) is not None:
            raise ConfigError(f"snapshot.folder: {why}")
        for worker, pid in living_workers(folder):
            raise ConfigError(
                f"name: run {job.name!r} is in use on this machine by worker {worker} (pid {pid}) of another"
                " Ray; stop it there, set RAY_ADDRESS to that Ray, or choose another name"
            )
        kept_slots.remove_rest(folder)


def living_workers(folder: Path) -> list[tuple[str, int]]:
    """(worker, pid) of every living process that has a heartbeat page under a run's folder."""
    return _living(folder.glob("*/*.page"))


def _living(paths: Iterable[Path]) -> list[tuple[str, int]]:
    pages = [read_page(path) for path in paths]
    return [(page.worker, page.pid) for page in pages if page and process_alive(page.pid, page.start_ticks)]


SIGNATURE = "agent"
"""File in a node's folder with its agent's pid and start time."""
UNSIGNED_GRACE_S = 60.0
"""An unsigned folder of that age is no agent's that is just starting."""


def claim(folder: Path, marker_bytes: int = 0) -> None:
    """Make and sign a node's folder; remove those of dead nodes of the same run beside it.

    Slots that such a node keeps are taken over.

    Args:
        marker_bytes: room to reserve for a marker, before slots take it all.
    """
    private_folder.make(folder)
    _sign(folder / SIGNATURE, f"{os.getpid()} {process_start_ticks(os.getpid())}")
    if marker_bytes:
        try:
            reserved_room.reserve(folder, marker_bytes)
        except OSError as error:  # it may have more by the time that slots are to be kept
            log.warning(
                "no room to keep slots after this run, %d bytes in %s: %s", marker_bytes, folder, error
            )
    for other in folder.parent.iterdir():
        if other == folder or not private_folder.is_own(other):
            continue
        keeps = kept_slots.read_marker(other) is not None
        if keeps and not _signed_by_living(other) and not _living(other.glob("*.page")):
            kept_slots.take_over(folder, other)
        elif not keeps and not _in_use(other):
            kept_slots.remove_node(other)


def _sign(path: Path, signature: str) -> None:
    """Replace an agent's signature, in its own room where the file system is full."""
    try:
        private_folder.write_text(path, signature)
    except OSError:
        if not path.exists():  # no agent was here before
            raise
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as file:
            file.write(signature.encode().ljust(path.stat().st_size))


def release(folder: Path) -> None:
    """Remove a node's folder, and the run's where it was the last one on this machine."""
    kept_slots.remove_node(folder)
    with contextlib.suppress(OSError):  # another node of a test's cluster may still have its folder there
        folder.parent.rmdir()


def _in_use(folder: Path) -> bool:
    if _living(folder.glob("*.page")):
        return True
    signed = _signed_by_living(folder)
    if signed is None:
        return folder.exists() and time.time() - folder.stat().st_mtime < UNSIGNED_GRACE_S
    return signed


def _signed_by_living(folder: Path) -> bool | None:
    """Whether the agent that signed a folder lives; None where nobody signed it."""
    try:
        pid, start_ticks = map(int, (folder / SIGNATURE).read_text().split())
    except (FileNotFoundError, ValueError):
        return None
    return process_alive(pid, start_ticks)
