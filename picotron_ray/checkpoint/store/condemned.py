"""Condemned lists: what garbage collection (``gc.py``) will delete, so that writers put it again.

A collection writes as many lists as it takes: each has at most ``MOST_NAMES``, so that any reader's bound of
JSON objects is far away, and a full disk's reserve (``storage/local.py``) has room for one.

A list that cannot be read condemns nothing. Its writer says so by leaving it out of its intent, and nothing
of it is deleted.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from picotron_ray.checkpoint.storage.base import Storage, StoredObject, encode_json, get_json
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.errors import CorruptError, NotFoundError, StorageFullError

log = logging.getLogger(__name__)
PREFIX = "condemned/"
MOST_NAMES = 10_000
MOST_LISTS = 400  # of one collection; the rest is left to the next one
"""Enough for the largest run planned for: a state of 405 billion parameters has 0.8 million chunks."""
_ADDRESS = re.compile("[0-9a-f]{64}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CondemnedList:
    """List as storage has it. ``mtime_s``: when it was published, by the store's clock."""

    key: str
    mtime_s: float
    chunks: frozenset[str]
    manifests: frozenset[str]

    @property
    def keys(self) -> set[str]:
        """Keys of all objects that it names."""
        return {chunk_key(address) for address in self.chunks} | self.manifests


def publish(storage: Storage, term: int, unused: Iterable[StoredObject]) -> tuple[int, bool]:
    """Write lists of objects to be deleted; returns how many objects they name, and whether more were left.

    A disk that is full takes some of them at least: once what those name is deleted, there is room again.

    Raises:
        StorageError: not one list could be written.
    """
    named, left = 0, False
    for number, part in enumerate(in_batches(unused, MOST_NAMES)):
        if number == MOST_LISTS:
            left = True
            break
        keys = [entry.key for entry in part]
        value = {
            "chunks": [key.rpartition("/")[2] for key in keys if key.startswith("chunks/")],
            "manifests": [key for key in keys if key.startswith("manifests/")],
        }
        try:
            storage.put(f"{PREFIX}{term}-{uuid.uuid4().hex}.json", encode_json(value))
        except StorageFullError:
            if not named:
                raise
            break
        named += len(part)
    return named, left


def read_lists(storage: Storage, entries: Iterable[StoredObject]) -> tuple[list[CondemnedList], list[str]]:
    """Return the lists that can be read, and the keys of those that cannot. One that is gone is neither."""
    found: list[CondemnedList] = []
    unreadable: list[str] = []
    for entry in entries:
        try:
            found.append(_read(storage, entry))
        except NotFoundError:  # its collection ended since the listing
            continue
        except CorruptError as error:
            log.warning("a condemned list is passed over: %s", error)
            unreadable.append(entry.key)
    return found, unreadable


def _read(storage: Storage, entry: StoredObject) -> CondemnedList:
    value = get_json(storage, entry.key)
    chunks, manifests = value.get("chunks"), value.get("manifests")
    named = _names(chunks, _is_address), _names(manifests, _is_manifest)
    if named[0] is None or named[1] is None:
        raise CorruptError(f"{entry.key} holds no lists of chunks and manifests", where=entry.key)
    return CondemnedList(entry.key, entry.mtime_s, named[0], named[1])


def _is_address(name: str) -> bool:
    return _ADDRESS.fullmatch(name) is not None


def _is_manifest(name: str) -> bool:
    return name.startswith("manifests/")


def _names(found: Any, fits: Callable[[str], bool]) -> frozenset[str] | None:
    whole = isinstance(found, list) and all(isinstance(name, str) and fits(name) for name in found)
    return frozenset(found) if whole else None


def in_batches(items: Iterable[T], most: int) -> Iterator[list[T]]:
    """Yield items in lists of at most so many, each drawn when it is asked for."""
    left = iter(items)
    while batch := list(islice(left, most)):
        yield batch
