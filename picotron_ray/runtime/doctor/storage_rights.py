"""Rights on storage, tried one by one on an object of the command's own; nothing of it is left."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.local import folders_to_make, remove_empty
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import AlreadyExistsError, StorageError
from picotron_ray.runtime.doctor.finding import Finding, timed
from picotron_ray.runtime.doctor.judgement import judge_store_clock

RETRY_S = 10.0  # an outage is waited out for so long only
CALL_S = 20.0
RIGHT_S = 30.0  # longest that one right may take, also where a delete hangs, which has no deadline itself


def impatient(config: StorageConfig) -> StorageConfig:
    """The storage of a config, with short waits."""
    return config.model_copy(update={"retry_deadline_s": RETRY_S, "call_timeout_s": CALL_S})


def judge_storage(config: StorageConfig) -> Iterator[Finding]:
    """Try every right that a run needs on its storage, under a name of its own."""
    run = f"doctor-{uuid.uuid4().hex[:8]}"
    with tidied(config, run):
        try:
            storage = timed(RIGHT_S, open_storage, impatient(config), run)
        except (StorageError, TimeoutError) as error:
            yield Finding(
                "storage write", "failed", str(error) or "it cannot be opened", _mend(config, "write")
            )
            return
        yield from _rights(storage, config)


def _mend(config: StorageConfig, right: str) -> str:
    """Return the mend where a right is missing: of a folder, or of a bucket."""
    return (_MENDS if config.url.startswith("s3://") else _FOLDER_MENDS)[right]


_FOLDER_MENDS = {
    "write": "set storage.url to a folder that this user may write to, on a disk with room",
    "read": "let this user read and list that folder",
    "conditional put": "use a file system with hard links (not all shared ones have them): two coordinators"
    " could both commit",
    "delete": "let this user remove files there: garbage would never go",
}
_MENDS = {
    "write": "check storage.url, its credentials and their right to put objects (s3:PutObject)",
    "read": "grant the right to get and list objects (s3:GetObject, s3:ListBucket)",
    "conditional put": "use a storage that honours If-None-Match: two coordinators could both commit",
    "delete": "grant the right to delete objects (s3:DeleteObject): garbage would never go",
}


def _rights(storage: Storage, config: StorageConfig) -> Iterator[Finding]:
    key = f"probe-{uuid.uuid4().hex}"
    tries: dict[str, Callable[[Storage, str], str]] = {
        "write": _write,
        "read": _read,
        "conditional put": _conditional_put,
        "delete": _delete,
    }
    written = True
    for right, work in tries.items():
        check = f"storage {right}"
        if not written:
            yield Finding(check, "skipped", "nothing could be written")
            continue
        try:
            problem = timed(RIGHT_S, work, storage, key)
        except TimeoutError:
            problem = f"{storage.where} gave no answer for {RIGHT_S:g} s"
        except StorageError as error:
            problem = str(error)
        if problem and right == "delete":
            problem += f"; left behind: {key}"
        written = written and not (right == "write" and problem)
        mend = _mend(config, right) if problem else ""
        yield Finding(check, "failed" if problem else "ok", problem or storage.where, mend)
        if right == "read" and not problem:
            yield from _clock(storage, key)


def _write(storage: Storage, key: str) -> str:
    storage.put_if_absent(key, _DATA)
    return ""


_DATA = b"picotron-ray doctor"


def _read(storage: Storage, key: str) -> str:
    if storage.get(key) != _DATA or storage.size(key) != len(_DATA):
        return "an object just written does not read back"
    if [found.key for found in storage.list(key)] != [key]:
        return "an object just written is not listed"
    return ""


def _conditional_put(storage: Storage, key: str) -> str:
    try:
        storage.put_if_absent(key, b"other bytes")
    except AlreadyExistsError:
        return ""
    return "a second conditional put of one key was taken"


def _delete(storage: Storage, key: str) -> str:
    storage.delete(key)
    return "" if storage.size(key) is None else "a deleted object is still there"


def _clock(storage: Storage, key: str) -> Iterator[Finding]:
    """Compare clocks by the time of last write, which an object of seconds ago has."""
    try:
        (found,) = timed(RIGHT_S, lambda: list(storage.list(key)))
    except (StorageError, TimeoutError, ValueError) as error:
        yield Finding("storage clock", "skipped", f"not told: {error}")
    else:
        yield judge_store_clock(found.mtime_s - time.time())


@contextlib.contextmanager
def tidied(config: StorageConfig, run: str) -> Iterator[None]:
    """Remove all objects of ``run`` in the end, and the folders that they made."""
    local = not config.url.startswith("s3:")
    new = folders_to_make(config.url, run) if local else []
    try:
        yield
    finally:
        if local:
            shutil.rmtree(open_storage(config, run).where, ignore_errors=True)
            remove_empty(new)
        else:
            with contextlib.suppress(StorageError, TimeoutError):  # the findings tell of it
                timed(RIGHT_S, _empty, open_storage(impatient(config), run))


def _empty(storage: Storage) -> None:
    for found in list(storage.list("")):
        storage.delete(found.key)
