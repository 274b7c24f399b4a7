"""Files of a source: listed by path, folder, glob or URL, and looked at again once they were read."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.hf_rows import find_dataset
from picotron_ray.data.source_files import InputFile, local_files, shown, walk
from picotron_ray.data.url_files import find_urls
from picotron_ray.errors import DataError

# Not part of every distribution's standard library, or not the library itself.
_STDLIB_SKIPS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "ensurepip"}


def find_files(data: DataConfig) -> list[InputFile]:
    """List all input files of the source, sorted by name. Raises DataError when there are none."""
    files: list[InputFile]
    if data.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in walk(root, _STDLIB_SKIPS) if f.path.suffix == ".py"]
        where = f"the standard library's folder {root}"
    else:
        if data.path is None:
            raise DataError(f"data.path: missing, but data.source {data.source} needs a file, folder or glob")
        where = shown(data.path)
        if data.source == "hf":
            return [find_dataset(data)]
        if "://" in data.path:
            files = find_urls(data.path, data.s3)
        else:
            files = list(local_files(os.path.expanduser(data.path)))
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
