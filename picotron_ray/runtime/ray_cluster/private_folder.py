"""Folders and files of one user in a file system that all users of a machine share.

``/dev/shm`` is open to everybody. Below it a user has one folder, ``picotron_ray-<uid>`` of mode 0700, so
that nobody else can look at, plant or remove anything in it. A folder of that name that another user has
made first, or a link, is refused by name. Nothing here follows a link, least of all what removes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from pathlib import Path

from picotron_ray.errors import PicotronError

log = logging.getLogger(__name__)
PREFIX = "picotron_ray"
"""Name of that folder in older versions, for all users."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def user_folder(base: str | os.PathLike[str]) -> Path:
    """Folder of this process's user below ``base``."""
    return Path(base) / f"{PREFIX}-{os.getuid()}"


def problem(folder: Path) -> str | None:
    """Explain why a folder is not this user's own; None where it is, or does not exist."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot look at {folder}: {error.strerror}; name a folder that this user may write to"
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        return None
    what = "as a link" if stat.S_ISLNK(found.st_mode) else f"of user {found.st_uid}"
    return f"saw {folder} {what}, expected a folder of user {os.getuid()}; remove it, or name another"


def make(folder: Path) -> None:
    """Make a folder below the user's own, and that one, for nobody else to look into.

    Raises:
        PicotronError: one of them is another user's, or a link.
    """
    above = [folder]
    while above[-1].name != user_folder("").name and above[-1] != above[-1].parent:
        above.append(above[-1].parent)
    above[-1].parent.mkdir(parents=True, exist_ok=True)
    for path in reversed(above):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if (why := problem(path)) is not None:
            raise PicotronError(f"snapshot.folder: {why}")
        path.chmod(0o700)


def is_own(folder: Path) -> bool:
    """Whether a folder, and those above it up to the user's own, exist, are this user's, and are no links."""
    paths = [folder, *folder.parents]
    top = next((i for i, path in enumerate(paths) if path.name in (user_folder("").name, PREFIX)), 0)
    return all(path.exists() and problem(path) is None for path in paths[: top + 1])


def remove_tree(folder: Path) -> None:
    """Remove a folder and all that is in it, if it is this user's own; a link goes, and not what it names."""
    if folder.is_symlink() and is_own(folder.parent):
        folder.unlink()
    elif is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        log.warning("%s is not removed: it, or a folder above it, is a link or another user's", folder)


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file at once by one that nobody else can read; ``durable``: it survives a power cut.

    Raises:
        OSError: it cannot be written, such as on a full disk; names the file, which is as it was.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(temporary, CREATE, 0o600), "w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error  # a write's own names no file
