"""Lines that the processes of a run on this machine wrote: its own Ray's logs, which outlive it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import follow_run
from picotron_ray.runtime.driver.run_connection import refuse_no_name
from picotron_ray.runtime.ray_cluster import local_ray


def log_lines(run: str, follow: bool = False) -> Iterator[tuple[str, str]]:
    """(process, line) of the run's actors on this machine, file after file.

    ``follow`` keeps reading until the run's Ray has ended.

    Raises:
        ConfigError: no log of that run lies on this machine.
    """
    refuse_no_name(run)
    folder = local_ray.log_folder(run)
    if not folder.is_dir() and (ray := local_ray.find(run)) is not None and ray.running:
        raise ConfigError(f"run: the logs of {run!r} in {folder} were deleted, though its Ray still runs")
    if not folder.is_dir():
        raise ConfigError(
            f"run: saw {run!r}, which had no Ray of its own on this machine; what a cluster's processes"
            " print, `ray logs` shows, and session_latest/logs in the folder of that Ray (/tmp/ray)"
        )
    offsets: dict[Path, int] = {}
    while True:
        ray = local_ray.find(run)  # before the reading: what it wrote last is read too
        for path in sorted(folder.glob("worker-*.err")) + sorted(folder.glob("worker-*.out")):
            yield from _new_lines(path, offsets)
        if not follow or ray is None or not ray.running:
            return
        time.sleep(follow_run.POLL_S)


_ACTOR = ":actor_name:"


def _new_lines(path: Path, offsets: dict[Path, int]) -> Iterator[tuple[str, str]]:
    process = path.stem.rpartition("-")[2]
    with path.open("rb") as file:
        file.seek(offsets.get(path, 0))
        for line in file:
            if not line.endswith(b"\n"):
                break
            offsets[path] = offsets.get(path, 0) + len(line)
            text = line.decode(errors="replace").rstrip("\n")
            if not text.startswith((":job_id:", _ACTOR, ":task_name:")):
                yield process, text
