"""Files of a source: found by path, folder, glob or URL, each known by its size and a mark of its content.

The mark is the time of the last change, or what the server has for it (an etag). Names are relative to the
folder that was asked for, so that a copy elsewhere splits the same way.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.errors import DataError

# Not part of every distribution's standard library, or not the library itself.
_STDLIB_SKIPS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "ensurepip"}


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


def find_files(data: DataConfig) -> list[InputFile]:
    """List all input files of the source, sorted by name. Raises DataError when there are none."""
    files: list[InputFile]
    if data.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _walk(root, _STDLIB_SKIPS) if f.path.suffix == ".py"]
        where = f"the standard library's folder {root}"
    else:
        if data.path is None:
            raise DataError(f"data.path: missing, but data.source {data.source} needs a file, folder or glob")
        where = shown(data.path)
        if data.source == "hf":
            from picotron_ray.data.hf_rows import find_dataset

            return [find_dataset(data)]
        if "://" in data.path:
            from picotron_ray.data.url_files import find_urls

            files = find_urls(data.path, data.s3)
        else:
            files = list(_expand(os.path.expanduser(data.path)))
    if not files:
        raise DataError(f"data.path: no files in {where}; give a file, folder or glob that holds some")
    return sorted(files, key=lambda file: file.name)


def check_unchanged(data: DataConfig, before: list[str]) -> None:
    """Raise DataError where a file is another one than when it was listed.

    Args:
        before: identities at that time. Files that came since are left alone.
    """
    now = {file.identity(): file for file in find_files(data)}
    for identity in before:
        if identity not in now:
            place, name, *_ = identity.split("\0")
            raise DataError(
                f"data.path: {name} (of {shown(place)}) changed while it was read; start again when nobody"
                " writes it"
            )


def _expand(path: str) -> list[SourceFile]:
    """List the regular files of a path: itself, all below a folder (hidden ones not), or a glob's."""
    if os.path.isdir(path):
        return list(_walk(Path(path), set()))
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


def _walk(root: Path, skip: set[str]) -> Iterator[SourceFile]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from None

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(d for d in folders if d not in skip and not d.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield SourceFile(path, path.relative_to(root).as_posix())
