"""A save, a collection and an end on a disk that is full, as a process with a mount namespace of its own.

``unshare -rm python -m tests.support.checkpoint.full_disk FOLDER`` mounts a small memory file system on
the folder, where nobody else sees it, and prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, verify_all
from picotron_ray.config.schema.service import CheckpointConfig, StorageConfig
from picotron_ray.errors import StorageError
from tests.support.checkpoint.checkpoint_kit import load, make_state, same, save

SHAPES = {"embed.weight": (200, 200), "norm.weight": (8,)}  # 640 KB with its moments
DISK_BYTES = 16 << 20


def main(disk: Path) -> dict[str, Any]:
    """Fill the disk between two saves, and try everything on it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)], check=True)
    storage = open_storage(StorageConfig(url=str(disk / "runs")), "r")
    log = RunLog(storage)
    log.claim_term("test")
    slots = disk.parent / "slots"
    for step in (5, 10):
        save(storage, log, slots / str(step), make_state(step, SHAPES), (1, 1, step))
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            full = os.strerror(error.errno or 0)
    said: dict[str, Any] = {"full": full}
    for name, work in {
        "save": lambda: save(storage, log, slots / "15", make_state(15, SHAPES), (1, 1, 15)),
        "end": lambda: storage.put("summary.json", b"x" * 8192),
        "collect": lambda: collect(storage, log, CheckpointConfig(keep_last=1, gc_grace_s=0)).deleted,
    }.items():
        try:
            said[name] = work() if name == "collect" else bool(work()) or "done"
        except StorageError as error:
            said[name] = f"{type(error).__name__}: {error}"
    good = latest_good(storage, log)
    assert good is not None
    said["good"] = [
        good.manifest.step,
        same(load(storage, good.manifest), make_state(good.manifest.step, SHAPES)),
    ]
    filler.unlink()
    save(storage, log, slots / "again", make_state(20, SHAPES), (1, 1, 20))
    said["reports"] = [[report.step, list(report.problems)] for report in verify_all(storage, log)]
    said["left"] = sorted(path.name for path in (disk / "runs" / "r" / ".tmp").iterdir())
    return said


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
