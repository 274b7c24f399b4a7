"""Room in the folder for temporary files, where Ray keeps its sockets, logs and spilled objects.

On a full one Ray's processes die as they start, and Ray guesses at the memory's or a person's doing.
"""

from __future__ import annotations

import os
import tempfile

import ray

from picotron_ray.runtime.ray_cluster.ray_calls import error_line

ROOM_BYTES = 16 << 20
"""Room without which Ray's head does not start; its logs take more."""
MEND = "make room there, or set TMPDIR to a folder on another disk"


def room_problem(folder: str = "", room_bytes: int = ROOM_BYTES) -> str:
    """Say why the folder for temporary files does not take some bytes; "" where it does.

    They are allocated, in a file that never has a name: beyond a quota the sizes promise room.

    Args:
        folder: default: of this process, `tempfile.gettempdir`.
    """
    try:
        folder = folder or tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, room_bytes)
    except OSError as error:
        why = error.strerror or str(error)
        return f"{folder or 'no folder for temporary files'} does not take {room_bytes >> 20} MiB ({why})"
    return ""


def start_problem(node: str, error: BaseException) -> str:
    """Say why a worker's start failed: no room on this very node, else the last line of Ray's error.

    Args:
        node: Ray's id of the worker's node.
    """
    here = ray.get_runtime_context().get_node_id() == node
    why = room_problem(room_bytes=1 << 20) if here else ""
    return f"{why}, where Ray keeps its sockets and logs; {MEND}" if why else error_line(error)
