"""Room that is taken early for a small file, in a file system that may be full when the file is written.

`reserve` takes the room of two files. `write` fills one in place, and renames it. The file that it replaces
takes its turn, so no page is given back that somebody else might take meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from picotron_ray.runtime.ray_cluster.private_folder import CREATE, write_text

ROOMS = ("reserved.1", "reserved.2")
_OLD = "reserved.old"


def reserve(folder: Path, size: int) -> None:
    """Take room for files of up to ``size`` bytes, where that was not done; raises OSError: there is none."""
    for room in (folder / name for name in ROOMS):
        if _size(room) >= size:
            continue
        temporary = room.with_name(f"{room.name}.new")
        file = os.open(temporary, CREATE, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            temporary.rename(room)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)


def write(path: Path, text: str) -> None:
    """Replace a file at once and durably, in room that was reserved in its folder; spaces pad it.

    Raises:
        OSError: no room was reserved that is large enough, and the file system is full.
    """
    data = text.encode()
    room = next((found for name in ROOMS if _size(found := path.parent / name) >= len(data)), None)
    if room is None:
        write_text(path, text, durable=True)
        return
    with os.fdopen(os.open(room, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as file:
        file.write(data.ljust(_size(room)))
        file.flush()
        os.fsync(file.fileno())
    old = path.with_name(_OLD)
    old.unlink(missing_ok=True)  # of a write that was killed, and perhaps another name of the file itself
    if not path.is_symlink():
        with contextlib.suppress(OSError):  # there is none, or the file system has no hard links
            os.link(path, old)
    room.rename(path)
    if old.exists():
        old.rename(room)


def remove(path: Path) -> None:
    """Remove a file; one that was written into reserved room leaves that to the next."""
    missing = [room for name in ROOMS if not (room := path.parent / name).exists()]
    if len(missing) == 1 and not path.is_symlink():
        path.rename(missing[0])
    else:
        path.unlink()


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return -1
