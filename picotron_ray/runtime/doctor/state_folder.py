"""Checks of the folders that a launch needs besides its own: of its records, at home, and Ray's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from picotron_ray.runtime.doctor.finding import Finding, Status, timed
from picotron_ray.runtime.ray_cluster import temporary_room
from picotron_ray.runtime.ray_cluster.local_ray import state_folder

ROOM_BYTES = 1 << 20
"""Room that a launch has to find there; the logs of long runs take more."""
LIMIT_S = 20.0
"""Longest wait for it, such as for a home on a mount that hangs."""
MEND = "make room there, or set XDG_STATE_HOME to a folder that can be written"


def judge_state_folder(local: bool) -> Finding:
    """Write 1 MiB where a launch from this machine would keep its state, and remove it.

    Args:
        local: its Ray is its own, which it has to remember: it is refused where that cannot be written.
    """
    broken: Status = "failed" if local else "warning"
    folder = state_folder().absolute()
    at = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        timed(LIMIT_S, _write, at)
    except TimeoutError:
        return Finding("state folder", broken, f"{folder}: {at} did not answer within {LIMIT_S:g} s", MEND)
    except OSError as error:
        why = error.strerror or str(error)
        return Finding("state folder", broken, f"{folder}: {at} does not take 1 MiB ({why})", MEND)
    return Finding("state folder", "ok", f"{folder} can be written")


def judge_temporary_folder(local: bool) -> Finding:
    """Allocate what Ray needs in the folder for temporary files.

    Args:
        local: launch starts its own Ray there; else the cluster's has its folders already.
    """
    broken: Status = "failed" if local else "warning"
    try:
        why = timed(LIMIT_S, temporary_room.room_problem)
    except TimeoutError:
        why = f"{tempfile.gettempdir()} did not answer within {LIMIT_S:g} s"
    if why:
        return Finding("temporary folder", broken, why, temporary_room.MEND)
    return Finding("temporary folder", "ok", f"{tempfile.gettempdir()} has room for Ray's files")


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(ROOM_BYTES))
        file.flush()
        os.fsync(file.fileno())
