"""Storage interface: a run's objects under flat keys, in a local folder or in S3.

Keys are relative to ``<storage.url>/<run>``. The interface is what both kinds can do atomically:

- ``put`` replaces an object as a whole: readers see the old or the new bytes, never a mixture;
- ``put_if_absent`` has exactly one winner, whatever races it, across machines. It is the fence of the
  log. Putting bytes that are there already succeeds, so a lost reply is settled by trying again.

Both return only when the object is durable. Operations wait out an outage up to
``storage.retry_deadline_s`` and then raise StorageUnavailableError: the object may then be there or not.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from picotron_ray.errors import AlreadyExistsError, CorruptError, NotFoundError, StorageError

JSON_BYTES = 64 << 20
"""Most bytes of a JSON object of a run but its manifests: 4,096 workers' generation takes under 1 MiB."""

_THREADS = 8  # that delete objects one at a time


class StoredObject(NamedTuple):
    """Object of a listing. ``mtime_s``: last write, seconds since the epoch by the store's clock."""

    key: str
    size: int
    mtime_s: float


class Storage(Protocol):
    """A run's objects. Every method may raise StorageError and StorageUnavailableError."""

    @property
    def where(self) -> str:
        """Address of the storage, for messages; without credentials."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store an object, replacing one of that key."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Store an object only where there is none of that key; the same bytes count as done.

        Raises:
            AlreadyExistsError: other bytes are there.
        """
        ...

    def get(self, key: str) -> bytes:
        """An object's bytes; NotFoundError where there is none."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``, fewer where the object ends; NotFoundError where there is none."""
        ...

    def size(self, key: str) -> int | None:
        """An object's length in bytes, or None where there is none."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """All objects whose key starts with ``prefix``, in order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""
        ...

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        """Remove up to 1,000 objects, as fast as the store can; nothing happens where there is none of a key.

        For a caller that may be replaced, so it tries once, and begins no deletion later than ``until_s`` by
        ``time.monotonic``. Returns the keys that are left: time was over, or the store was too busy.
        """
        ...


def probe(storage: Storage) -> None:
    """Check that the storage works: write, read, list, refuse a second conditional put, delete.

    Raises:
        StorageError: one line that says what is wrong (missing, read-only, full, wrong bucket or key).
    """
    key, data = f"probe-{uuid.uuid4().hex}", os.urandom(64)
    storage.put_if_absent(key, data)
    try:
        if storage.get(key) != data or [entry.key for entry in storage.list(key)] != [key]:
            raise StorageError(
                f"{storage.where}: an object just written does not read back; use another storage"
            )
        try:
            storage.put_if_absent(key, b"other")
        except AlreadyExistsError:
            return
        raise StorageError(
            f"{storage.where}: conditional writes are not honoured (If-None-Match), so two coordinators"
            " could both commit; use a storage that supports them"
        )
    finally:
        storage.delete(key)


def clock_s(storage: Storage) -> float:
    """The storage's clock, from an object just written."""
    key = "clock/now"
    storage.put(key, b"")
    return next(entry.mtime_s for entry in storage.list(key))


def delete_each(delete: Callable[[str], None], keys: Sequence[str], until_s: float) -> list[str]:
    """``Storage.delete_many`` by a few threads, for a storage that removes one object at a time.

    Raises:
        StorageError: the first of what they met; all of the keys were tried.
    """

    waiting, left = deque(keys), list[str]()
    problems: list[Exception] = []

    def work() -> None:
        with suppress(IndexError):
            while key := waiting.popleft():
                if time.monotonic() > until_s:
                    left.append(key)
                    continue
                try:
                    delete(key)
                except Exception as error:  # noqa: BLE001 - whatever it is, the caller raises it
                    problems.append(error)

    # daemons, as a call below them may hang for ever
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(keys)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return left


# --- JSON objects that carry their own digest --------------------------------------------------------


def encode_json(value: dict[str, Any]) -> bytes:
    """Encode as canonical JSON (sorted keys, no spaces): equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def decode_json(key: str, data: bytes) -> dict[str, Any]:
    """Parse a JSON object; CorruptError where it is none, or nested too deep to be one of ours."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{key} is not readable JSON (truncated or damaged): {error}", where=key
        ) from error
    if not isinstance(value, dict):
        raise CorruptError(f"{key} holds {type(value).__name__}, expected a JSON object", where=key)
    return value


def get_bounded(storage: Storage, key: str, most: int) -> bytes:
    """An object's bytes, where there are at most ``most``.

    Raises:
        CorruptError: there are more; no more than one of them was fetched.
        NotFoundError: there is no such object.
    """
    data = storage.get_range(key, 0, most + 1)
    if len(data) > most:
        raise CorruptError(f"{key} has more than the {most} bytes that are expected", where=key)
    return data


def get_json(storage: Storage, key: str, most: int = JSON_BYTES) -> dict[str, Any]:
    """A JSON object from storage; raises as `get_bounded` and `decode_json`."""
    return decode_json(key, get_bounded(storage, key, most))


def get_or_none(storage: Storage, key: str, most: int = JSON_BYTES) -> bytes | None:
    """An object's bytes, or None where there is none; CorruptError as `get_bounded`."""
    try:
        return get_bounded(storage, key, most)
    except NotFoundError:
        return None
