"""Deletion of objects by a collector that may be replaced at any time, in batches (``gc.py``).

Before each batch the log is read on, so that a collector of an old term stops there. What the log said
counts as known for ``KNOWN_S`` from when it was asked, and no deletion begins later than that, whatever
sleeps in between: the storage is told the time (``Storage.delete_many``). Objects are taken from a listing as
it goes on, so that none is deleted long after it was listed. What a commit on another thread needs is left
(``in_use.py``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from picotron_ray.checkpoint.storage.base import Storage, StoredObject
from picotron_ray.checkpoint.storage.deadline import deletions_given_up
from picotron_ray.checkpoint.store.condemned import in_batches
from picotron_ray.checkpoint.store.in_use import InUse
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.errors import FencedError, StorageUnavailableError

BATCH = 1000  # S3 takes no more in a request
KNOWN_S = 2.0
"""Time for which what the log says counts as known: a successor takes longer from its claim to a commit."""
_MOST_CHECKS = 3
_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits for a storage that is too busy to delete a single object, one after the other."""


@dataclass(slots=True)
class Deleted:
    """Count of what was deleted. ``hung``: one that was left, as an earlier deletion of it hangs."""

    count: int = 0
    size: int = 0
    hung: str = ""


def delete_listed(storage: Storage, log: RunLog, in_use: InUse, doomed: Mapping[str, float]) -> Deleted:
    """Delete chunks and manifests that were last written before a time each, by the store's clock.

    Args:
        log: of a claimed term; it is read on here.
        doomed: keys, each with that time.

    Raises:
        FencedError: a newer term was claimed.
        StorageError: the storage refused, or did not answer; some of them are gone.
    """
    done = Deleted()
    hung = deletions_given_up(storage)
    for prefix in ("chunks/", "manifests/"):
        listed = storage.list(prefix)
        old = (each for each in listed if each.key in doomed and each.mtime_s < doomed[each.key])
        for batch in in_batches(old, BATCH):
            done.hung = next((each.key for each in batch if each.key in hung), done.hung)
            _delete_batch(storage, log, in_use, [each for each in batch if each.key not in hung], done)
    return done


def delete_settled(storage: Storage, intents: deque[str]) -> None:
    """Delete intents of saves that are committed; what is left stays in ``intents``, for the next time.

    Raises:
        StorageError: the storage refused, or did not answer.
    """
    for _ in range(-(-len(intents) // BATCH)):
        batch = _taken(intents)
        left: Sequence[str] = batch
        try:
            left = storage.delete_many(batch, time.monotonic() + KNOWN_S) if batch else ()
        finally:
            intents.extend(left)


def _taken(intents: deque[str]) -> list[str]:
    """Take a batch of what other threads may add to, or take from."""
    batch: list[str] = []
    with suppress(IndexError):
        while len(batch) < BATCH:
            batch.append(intents.popleft())
    return batch


def _delete_batch(
    storage: Storage, log: RunLog, in_use: InUse, batch: Iterable[StoredObject], done: Deleted
) -> None:
    sizes = {each.key: each.size for each in batch}
    left, waits = list(sizes), iter(_WAITS_S)
    while left:
        asked = _still_newest(storage, log)
        with in_use.deletion(left) as free:
            left = list(storage.delete_many(free, asked + KNOWN_S)) if free else []
        gone = set(free).difference(left)
        done.count += len(gone)
        done.size += sum(sizes[key] for key in gone)
        if left and not gone:
            wait = next(waits, None)
            if wait is None:
                raise StorageUnavailableError(
                    f"{storage.where} takes no deletions, {left[0]} is left; check its load and its network"
                )
            time.sleep(wait)


def _still_newest(storage: Storage, log: RunLog) -> float:
    """Read what is new in the log until its answer is fresh; returns when that was asked for.

    All of the log would take longer than an answer is fresh, where it is long.

    Raises:
        FencedError: a newer term was claimed.
        StorageUnavailableError: the log takes too long to answer.
    """
    for _ in range(_MOST_CHECKS):
        asked = time.monotonic()
        _check_term(log)
        if time.monotonic() - asked <= KNOWN_S / 2:
            return asked
    raise StorageUnavailableError(f"{storage.where}: the log is read too slowly; collection is put off")


def _check_term(log: RunLog) -> None:
    log.read_on()
    newest = max(entry.term for entry in log.entries())
    if newest > log.term:
        raise FencedError(f"term {newest} was claimed, this collector has term {log.term}; stop")
