"""Folders of a node's cache: made once, under a lock, and seen whole or not at all.

A folder is written beside its place and renamed at the end. Workers of a node start together: one of them
makes it while the others wait for the lock, which the kernel releases when its holder dies.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from picotron_ray.errors import DataError

_Opened = TypeVar("_Opened")


def open_or_make(
    place: Path, what: str, open_place: Callable[[Path], _Opened | None], write: Callable[[Path], None]
) -> _Opened:
    """Open what lies at ``place``, or make it there.

    Args:
        what: names it in messages.
        open_place: None where there is nothing, or something damaged.
        write: fills an empty folder.

    Raises DataError where the cache cannot be written, or does not read back as written.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_suffix(".lock")):
            if (opened := open_place(place)) is None:
                _make(place, write)
                opened = open_place(place)
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(f"{what}: cannot write {place}: {why}; free space or allow writing there") from None
    if opened is None:
        raise DataError(f"{what}: {place} does not read back as written; check that disk")
    return opened


def _make(place: Path, write: Callable[[Path], None]) -> None:
    fresh = place.with_suffix(".new")
    for stale in (fresh, place):  # of a maker that was killed, or damaged
        if stale.exists():
            shutil.rmtree(stale)
    fresh.mkdir()
    try:
        write(fresh)
        fresh.rename(place)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
