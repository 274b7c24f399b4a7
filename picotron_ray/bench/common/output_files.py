"""Files that a benchmark is asked to write once it has measured."""

from __future__ import annotations

import os
from pathlib import Path

from picotron_ray.errors import ConfigError


def refuse_unwritable(option: str, file: Path | None) -> None:
    """Raise ConfigError where a file that is asked for cannot be written, as far as can be told before."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        raise ConfigError(f"{option}: saw {file}, expected a file in a folder that exists")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{option}: saw {file}, which may not be written; name another file")
