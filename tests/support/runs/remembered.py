"""A run that a machine remembers: the event log of its coordinator."""

from __future__ import annotations

import time

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.replay import header_line
from picotron_ray.runtime.coordinator.event_log.writer import EventLogWriter
from picotron_ray.runtime.ray_cluster.names import event_folder


def remember(job: JobConfig, identity: str, step: int = 40, finished: bool = False, term: int = 1) -> None:
    """Leave the event log of a coordinator that had a commit."""
    folder = event_folder(job.name)
    folder.mkdir(parents=True, exist_ok=True)
    offset_s = time.time() - time.monotonic()
    header = header_line(job, {"device": "cpu"}, launch="l", offset_s=offset_s, identity=identity)
    log = EventLogWriter(folder, term, header, lambda: {"line": 0}, lambda *words: None)
    if step:
        log.add(time.monotonic(), 0.0, m.Appended("commit", m.GenerationId(term, 1), step, 9), [])
    end: list[m.Command] = [m.Finish("finished", "all steps")] if finished else []
    log.add(time.monotonic(), 0.0, m.Tick(), end)
    log.close()
