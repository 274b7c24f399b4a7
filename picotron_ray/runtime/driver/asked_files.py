"""Files that a command is asked to write: refused before the work, and replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from picotron_ray.errors import ConfigError

OF_PROCESSES = ("/dev/std", "/dev/fd/", "/proc/")
"""Names of what a process has open: such a file is written where it is, not replaced."""


def refuse_unwritable(option: str, file: Path | None) -> None:
    """Raise ConfigError where a file that is asked for cannot be written, as far as can be told before."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        raise ConfigError(f"{option}: saw {file}, expected a file in a folder that exists")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{option}: saw {file}, which may not be written; name another file")


def write_asked(option: str, file: Path, text: str) -> None:
    """Write a file that ``option`` names; what is there stays as it was where that fails.

    Devices and pipes are written where they are.

    Raises:
        ConfigError: it cannot be written, such as on a full disk.
    """
    try:
        if _stands_alone(file):
            _replace(file.resolve(), text)
        else:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot write {file}: {error.strerror}; name a file that can be written"
        ) from None


def _stands_alone(file: Path) -> bool:
    if str(file.absolute()).startswith(OF_PROCESSES):
        return False
    return not file.exists() or stat.S_ISREG(file.stat().st_mode)


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        if file.exists():
            shutil.copymode(file, temporary)
        os.replace(temporary, file)
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or its folder takes nothing
            temporary.unlink()
