"""Claims of scripted faults: each strikes once in the life of a run."""

from __future__ import annotations

import json
import time
import uuid

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.errors import AlreadyExistsError


def claim(storage: Storage, index: int) -> bool:
    """Claim fault ``index`` of the config; True for the first caller in the life of the run.

    The claim is the object ``chaos/<index>``, put before the fault strikes. So it strikes once, whichever
    machine it falls on, and however often a recovery, a restart of the coordinator or a new launch passes
    the same step. The object holds the time of the strike.
    """
    mark = {"at_s": time.time(), "nonce": uuid.uuid4().hex}
    try:
        storage.put_if_absent(f"chaos/{index}", json.dumps(mark).encode())
    except AlreadyExistsError:
        return False
    return True
