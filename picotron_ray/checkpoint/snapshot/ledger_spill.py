"""Spilled part of a ledger's tail: files on the node's disk that hold the lines which slots no longer carry.

While storage is out, each step adds a line that no commit takes away. Snapshots would grow with the outage.
So the oldest lines go into files of one folder, ``<first>-<last>-<blake3>.ledger``. The first line of a file
names the one before it, so the name of the newest vouches for all of them; that name is the first line of a
slot's ledger (`marker`). Ranks write the same lines, so all nodes have the same files. Torch-free.

A file outlives the commit that its lines are in for as long as a slot of the node is older than that: a
rewind may go on from this slot, which makes the commit void, and its lines are to be committed once more. So
the node's slots say which files may go (`sweep`). Several nodes may share a home: each has a folder of its
own, which goes where its slots go. What was uploaded is also found in storage, by its name
(``checkpoint.store.spilled_segments``).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from picotron_ray.errors import CorruptError

SUFFIX = ".ledger"


class Spilled(NamedTuple):
    """Spilled part of a slot's ledger.

    Fields:
        name: of its newest file; "" where nothing is spilled.
        first: step that it begins with; earlier ones were committed when the slot was written.
    """

    name: str = ""
    first: int = 1


def marker(spilled: Spilled) -> str:
    """First line of a slot's ledger whose earlier lines are in files."""
    return json.dumps({"spilled": spilled.name, "first": spilled.first})


def split_marker(ledger: Sequence[str]) -> tuple[Spilled, Sequence[str]]:
    """The spilled part of a slot's ledger, and the lines after it."""
    head = json.loads(ledger[0]) if ledger else {}
    if head.get("spilled"):
        return Spilled(Path(str(head["spilled"])).name, int(head.get("first", 1))), ledger[1:]
    return Spilled(), ledger


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
    data = whole(after, "".join(f"{line}\n" for line in lines).encode())
    name = f"{first}-{last}-{blake3(data).hexdigest()}{SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    keep(folder, name, data)
    return name


def whole(after: str, lines: bytes) -> bytes:
    """Content of a file, of its lines as text and the name of the one before it."""
    return json.dumps({"after": after}).encode() + b"\n" + lines


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


def sweep(folder: Path, step: int, ledgers: Iterable[Sequence[str]]) -> None:
    """Remove the files all of whose steps are committed, but those that a slot may still need.

    Args:
        step: of the newest commit.
        ledgers: of the node's sealed slots.
    """
    least = min((found.first for found, _ in map(split_marker, ledgers) if found.name), default=step + 1)
    for path in folder.glob(f"*{SUFFIX}"):
        if steps_of(path.name)[1] < min(least, step + 1):
            path.unlink(missing_ok=True)
