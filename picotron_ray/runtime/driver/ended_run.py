"""End of a run whose coordinator is gone, as its storage tells it.

A coordinator that is done lingers for those that follow it. A driver that was stopped, or cut off, for longer
than that finds nobody: the summary in storage says how the run ended.
"""

from __future__ import annotations

import logging
from typing import Any

from picotron_ray.checkpoint.storage.base import get_json
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import StorageError
from picotron_ray.runtime.coordinator.run_record import EXIT_CODES

log = logging.getLogger(__name__)


def stored_end(job: JobConfig, term: int) -> dict[str, Any] | None:
    """Return what a run's last status would have said, where its summary is in storage; else None.

    Args:
        term: the newest that was heard of; a summary of an older one is that of an earlier launch.
    """
    try:
        summary = get_json(open_storage(job.storage, job.name), "summary.json")
    except StorageError as error:
        log.debug("no summary of run %s: %s", job.name, error)
        return None
    if not term or summary.get("term", 0) < term:
        return None
    return {
        "done": True,
        "gone": True,
        "state": summary["status"],
        "term": summary["term"],
        "exit_code": EXIT_CODES[summary["status"]],
        "detail": summary["detail"],
        "summary": summary,
    }
