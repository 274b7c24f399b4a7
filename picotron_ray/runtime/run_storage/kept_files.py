"""Files that a run keeps beside its checkpoints, each with a digest in a record."""

from __future__ import annotations

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, get_bounded
from picotron_ray.errors import CorruptError, NotFoundError


def read_kept(storage: Storage, key: str, digest: str, record: str, most_bytes: int) -> bytes:
    """Read a kept file.

    Args:
        digest: blake3 that the record has of it, in hex.
        record: key of the record, for messages.
        most_bytes: a longer file is refused.

    Raises CorruptError where it is missing or not what was stored.
    """
    try:
        data = get_bounded(storage, key, most_bytes)
    except NotFoundError as error:
        raise CorruptError(f"{key} is missing from {storage.where}", where=key) from error
    if blake3(data).hexdigest() != digest:
        raise CorruptError(f"{key} does not match its digest in {record}", where=key)
    return data
