"""Look of a node at the run's storage where that is a folder: its path may mean another one there."""

from __future__ import annotations

import time

from picotron_ray.checkpoint.storage.base import JSON_BYTES, get_bounded
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import decode_entry, entry_key
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import NotFoundError, StorageError

CALL_S = 2.0  # a folder that hangs is an outage, and says nothing of the node
SEEN_S = 3.0
"""Longest that a shared folder may take to show a file that another node has just written."""
LOOK_S = 0.25


def unseen_problem(config: StorageConfig, run: str, identity: str, node: str) -> str:
    """Explain why a node does not see the folder that the coordinator writes; "" where it does.

    That is also the answer while storage fails, and for object storage, whose address means one place.

    Args:
        identity: of the run (`RunLog.identity`); "": not known.
        node: host of this node, for the message.
    """
    if not identity or "://" in config.url.removeprefix("file://"):
        return ""
    storage = open_storage(config.model_copy(update={"call_timeout_s": CALL_S}), run)
    until = time.monotonic() + SEEN_S
    while True:
        try:
            first = decode_entry(1, get_bounded(storage, entry_key(1), JSON_BYTES)).nonce
        except NotFoundError:
            first = ""
        except StorageError:
            return ""
        if first == identity:
            return ""
        if time.monotonic() >= until:
            break
        time.sleep(LOOK_S)
    return (
        f"storage.url: saw {'another' if first else 'no'} run {run!r} in {storage.where} on node {node},"
        " where the coordinator has this one; give a folder that every node sees, or s3://bucket/prefix"
    )
