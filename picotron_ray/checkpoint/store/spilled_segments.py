"""Spilled part of a slot's ledger as segments in storage, which outlive the files that they were made of.

The segment of a file is put under the file's own name and the one of the file before it. So a chain that a
slot names can be followed where a node has lost its files, or has removed them as committed and a rewind has
made that commit void: the name of a file is a digest of its lines and of the name before it. Torch-free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from picotron_ray.checkpoint.snapshot.ledger_spill import SUFFIX, Spilled, check, read, steps_of, whole
from picotron_ray.checkpoint.storage.base import Storage, get_bounded
from picotron_ray.checkpoint.store.manifest import LINE_BYTES, Segment
from picotron_ray.errors import CorruptError, NotFoundError

log = logging.getLogger(__name__)
FOLDER = "ledger/spilled/"
_NONE = "none"  # before the first file of a chain


def stored_segments(storage: Storage, spilled: Spilled, folder: Path | None) -> list[Segment]:
    """Segments of what was spilled of a slot's ledger, oldest first, as far back as it can be had.

    Args:
        folder: with the node's files; those that it has and storage has not are put.

    Raises:
        StorageError: the storage refused or was unavailable.
    """
    found: list[Segment] = []
    name = spilled.name
    while name and (not found or found[-1].first > spilled.first):
        file = _of_folder(storage, folder, name) or _of_storage(storage, name)
        if file is None:
            log.warning("spilled ledger %s is neither in %s nor in %s", name, folder, storage.where)
            break
        name, segment = file
        found.append(segment)
    return found[::-1]


def _of_folder(storage: Storage, folder: Path | None, name: str) -> tuple[str, Segment] | None:
    """Name of the file before one, and its segment, which is in storage then; None where it is not here."""
    if folder is None:
        return None
    try:
        after, lines = read(folder, name)
    except FileNotFoundError:
        return None
    except (CorruptError, OSError) as error:  # another node, or storage, may have it sound
        log.warning("spilled ledger %s: %s", name, error)
        return None
    segment = Segment(_key(name, after), *steps_of(name), blake3(lines).hexdigest())
    if storage.size(segment.key) != len(lines):
        storage.put(segment.key, lines)
    return after, segment


def _of_storage(storage: Storage, name: str) -> tuple[str, Segment] | None:
    """As `_of_folder`, of what an upload has put."""
    first, last = steps_of(name)
    for after, key in _stored_as(storage, name):
        try:
            lines = get_bounded(storage, key, LINE_BYTES * (last - first + 1))
            check(name, whole(after, lines))
        except (NotFoundError, CorruptError) as error:
            log.warning("spilled ledger %s: %s", key, error)
            continue
        return after, Segment(key, first, last, blake3(lines).hexdigest())
    return None


def _stored_as(storage: Storage, name: str) -> Iterator[tuple[str, str]]:
    """Keys under which a file may be, each with the name of the file before it."""
    prefix = f"{FOLDER}{name.removesuffix(SUFFIX)}."
    for entry in storage.list(prefix):
        before = entry.key.removeprefix(prefix).removesuffix(".jsonl")
        yield ("" if before == _NONE else before + SUFFIX), entry.key


def _key(name: str, after: str) -> str:
    return f"{FOLDER}{name.removesuffix(SUFFIX)}.{after.removesuffix(SUFFIX) or _NONE}.jsonl"
