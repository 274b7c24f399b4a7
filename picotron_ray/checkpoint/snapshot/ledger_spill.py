"""Spilled part of a ledger's tail: files on the node's disk that hold the lines which slots no longer carry.

While storage is out, each step adds a line that no commit takes away. Snapshots would grow with the outage.
So the oldest lines go into files of one folder, ``<first>-<last>-<blake3>.ledger``. The first line of a file
names the one before it, so the name of the newest vouches for all of them; that name is the first line of a
slot's ledger (`marker`). Ranks write the same lines, so all nodes have the same files. Torch-free.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from picotron_ray.errors import CorruptError

SUFFIX = ".ledger"


def marker(name: str) -> str:
    """First line of a slot's ledger whose earlier lines are in files, the newest of them ``name``."""
    return json.dumps({"spilled": name})


def split_marker(ledger: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Name of the newest file of a slot's ledger ("" where nothing is spilled), and the lines after it."""
    if ledger and (found := json.loads(ledger[0]).get("spilled")):
        return Path(str(found)).name, ledger[1:]
    return "", ledger


def steps_of(name: str) -> tuple[int, int]:
    """First and last step of a file, both inclusive."""
    first, last, _ = name.removesuffix(SUFFIX).split("-")
    return int(first), int(last)


def spill(folder: Path, after: str, lines: Sequence[str], first: int, last: int) -> str:
    """Write the lines of steps ``first`` to ``last`` into a file; returns its name.

    Args:
        after: name of the file before it, "" where it is the first.

    Raises:
        OSError: the folder cannot be written.
    """
    data = "".join(f"{line}\n" for line in (json.dumps({"after": after}), *lines)).encode()
    name = f"{first}-{last}-{blake3(data).hexdigest()}{SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    keep(folder, name, data)
    return name


def keep(folder: Path, name: str, data: bytes) -> None:
    """Put a file whole, unless it is there.

    Raises:
        CorruptError: the data are not what the name says.
        OSError: the folder cannot be written.
    """
    check(name, data)
    if (folder / name).exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = folder / f"{uuid.uuid4().hex}.new"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        temporary.rename(folder / name)
    finally:
        temporary.unlink(missing_ok=True)


def check(name: str, data: bytes) -> None:
    """Raise CorruptError where a file's bytes are not what its name says."""
    if blake3(data).hexdigest() != name.removesuffix(SUFFIX).rpartition("-")[2]:
        raise CorruptError(f"spilled ledger {name} does not match its digest", where=name)


def read(folder: Path, name: str) -> tuple[str, bytes]:
    """Name of the file before it, and its lines as stored text.

    Raises:
        CorruptError: it does not match its name.
        FileNotFoundError: it is not here.
    """
    data = (folder / name).read_bytes()
    check(name, data)
    head, _, lines = data.partition(b"\n")
    return Path(str(json.loads(head)["after"])).name, lines


def chain(folder: Path, newest: str) -> Iterator[tuple[str, bytes]]:
    """Yield names and lines of a chain's files, the newest first, as far back as they are here.

    Files whose steps are committed are removed, so a chain may begin anywhere.

    Raises:
        CorruptError: one does not match its name.
    """
    name = newest
    while name:
        try:
            after, lines = read(folder, name)
        except FileNotFoundError:
            return
        yield name, lines
        name = after


def sweep(folder: Path, step: int) -> None:
    """Remove the files all of whose steps are at most ``step``: they are in storage."""
    for path in folder.glob(f"*{SUFFIX}"):
        if steps_of(path.name)[1] <= step:
            path.unlink(missing_ok=True)
