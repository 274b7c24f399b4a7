"""A coordinator that is stopped just before its commit; run as a process of its own by ``fencing``.

``stopped_writer.py CONFIG_JSON RUN FOLDER POINT``: POINT says where it stops itself: "commit" (the
manifest is there, the log entry is not) or "put" (the entry's number is chosen already).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.commit import commit
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import FencedError
from tests.support.checkpoint.checkpoint_kit import generation, make_state, upload


def main() -> None:
    config, run, folder, point = sys.argv[1:]
    storage = open_storage(StorageConfig.model_validate_json(config), run)
    armed = False

    def stop() -> None:
        if armed:
            os.kill(os.getpid(), signal.SIGSTOP)

    log = RunLog(storage, before_put=stop if point == "put" else None)
    log.claim_term("old")
    log.append("generation", generation(1, 1))
    parts = upload(storage, Path(folder), make_state(1), (1, 1, 5))
    armed = True
    try:
        commit(storage, log, parts, on_phase=(lambda phase: stop()) if point == "commit" else None)
    except FencedError as error:
        print("FencedError", error)
        sys.exit(7)


if __name__ == "__main__":
    main()
