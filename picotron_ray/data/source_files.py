"""Files of this node, each known by its size and a mark of its content; and the words for what is refused.

The mark is the time of the last change, or what the server has for it (an etag). Names are relative to the
folder that was asked for, so that a copy elsewhere splits the same way.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from picotron_ray.errors import DataError


class InputFile(Protocol):
    """Input file, wherever it lies."""

    @property
    def name(self) -> str:
        """Name relative to the folder asked for (posix separators)."""

    @property
    def where(self) -> str:
        """Path or URL, for messages."""

    def identity(self) -> str:
        """Place, name, size and mark. Raises DataError where the file is gone."""

    def open(self) -> BinaryIO:
        """Open it for reading. Raises DataError or OSError."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Input file of this node: its path, and its name relative to the folder asked for."""

    path: Path
    name: str

    @property
    def where(self) -> str:
        """Path, for messages."""
        return shown(self.path)

    def identity(self) -> str:
        """Path, name, size and time of the last change."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise unreadable(self.path, error) from None
        return f"{self.path.absolute()}\0{self.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n"

    def open(self) -> BinaryIO:
        """Open it for reading."""
        return self.path.open("rb")


def shown(path: str | Path) -> str:
    """Show a path in a message: one line of valid UTF-8, whatever bytes the file's name is made of."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def unreadable(path: str | Path, error: OSError | ValueError) -> DataError:
    """Make the error for a file or folder that the system refuses."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DataError(
        f"data.path: cannot read {shown(path)}: {why}; give a file, folder or glob that this user can read"
    )


def local_files(path: str) -> list[SourceFile]:
    """List the regular files of a path: itself, all below a folder (hidden ones not), or a glob's."""
    if os.path.isdir(path):
        return list(walk(Path(path), set()))
    if os.path.exists(path) or not glob.has_magic(path):
        require_file(path)
        return [SourceFile(Path(path), os.path.basename(path))]
    # names are relative to the part before the first wildcard, as they are for a folder
    fixed = Path(path.split("*")[0].split("?")[0].split("[")[0])
    root = fixed if path.startswith(f"{fixed}{os.sep}") else fixed.parent
    found = [Path(match) for match in glob.glob(path, recursive=True)]
    return [SourceFile(f, f.relative_to(root).as_posix()) for f in found if f.is_file()]


def require_file(path: str | Path) -> None:
    """Raise DataError unless ``path`` is a regular file: a pipe or device would block or never end."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise unreadable(path, error) from None
    if not regular:
        raise DataError(f"data.path: {shown(path)} is neither a regular file nor a folder; give one of those")


def walk(root: Path, skip: set[str]) -> Iterator[SourceFile]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from None

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(d for d in folders if d not in skip and not d.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield SourceFile(path, path.relative_to(root).as_posix())


def require_columns(there: list[str], needed: dict[str, str], where: str) -> None:
    """Raise DataError where a column is missing.

    Args:
        needed: columns, each with the config key that names it.
    """
    for name, key in needed.items():
        if name not in there:
            raise DataError(
                f"{key}: {where} has no column {name!r} (seen: {', '.join(there[:8])}); name the right one"
            )
