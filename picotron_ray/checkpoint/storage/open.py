"""Open the storage that a config names."""

from __future__ import annotations

from collections.abc import Callable

from picotron_ray.checkpoint.storage.base import Storage, probe
from picotron_ray.checkpoint.storage.deadline import DeadlineStorage
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import StorageError

LEAST_CALL_S = 60.0


def open_storage(config: StorageConfig, run: str, on_answer: Callable[[], None] | None = None) -> Storage:
    """Open the storage of one run. Nothing is contacted or created yet: see ``probe``.

    Each of its calls ends after ``storage.call_timeout_s``, also where what lies below hangs.

    Args:
        config: the config's ``storage`` section; ``url`` is a folder or ``s3://bucket/prefix``.
        run: name of the run, which is appended to the URL.
        on_answer: called, from any thread, whenever a call has succeeded.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     storage = open_storage(StorageConfig(url=folder), "essays")
        ...     storage.put("notes/first", b"hello")
        ...     storage.get("notes/first"), [entry.key for entry in storage.list("notes/")]
        (b'hello', ['notes/first'])

    Raises:
        StorageError: the URL is of no kind that is known.
    """
    return DeadlineStorage(_open(config, run), call_limit_s(config), on_answer)


def try_storage(config: StorageConfig, run: str) -> None:
    """Check that the storage of a run works (`probe`), and leave nothing there: no object and no new folder.

    Raises:
        StorageError: one line that says what is wrong.
    """
    storage = open_storage(config, run)
    if config.url.startswith("s3:"):
        return probe(storage)
    from picotron_ray.checkpoint.storage.local import folders_to_make, remove_empty

    new = folders_to_make(config.url, run)
    try:
        return probe(storage)
    finally:
        remove_empty(new)


def call_limit_s(config: StorageConfig) -> float:
    """Longest that one call may take: as configured, else twice the wait for an outage, at least a minute."""
    return config.call_timeout_s or max(LEAST_CALL_S, 2 * config.retry_deadline_s)


def _open(config: StorageConfig, run: str) -> Storage:
    kind, separator, rest = config.url.partition("://")
    if not separator:
        kind, rest = "file", config.url
    if kind == "file":
        from picotron_ray.checkpoint.storage.local import LocalStorage

        return LocalStorage(rest, run)
    if kind == "s3":
        from picotron_ray.checkpoint.storage.s3 import S3Storage

        return S3Storage(config, run)
    raise StorageError(f"storage.url {kind}://… is not supported; use a folder or s3://bucket/prefix")
