"""End of a run whose coordinator is gone, as its storage tells it.

A coordinator that is done lingers for those that follow it. A driver that was stopped, or cut off, for longer
than that finds nobody: the summary in storage says how the run ended. Where that is, the event log on the
coordinator's machine knows, which stays.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from pydantic import ValidationError

from picotron_ray.checkpoint.storage.base import Storage, get_json
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.lineage import newest_commit
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import RUN_NAME
from picotron_ray.errors import PicotronError, StorageError
from picotron_ray.runtime.coordinator.event_log import files
from picotron_ray.runtime.coordinator.run_record import EXIT_CODES
from picotron_ray.runtime.driver.known_run import known_here
from picotron_ray.runtime.ray_cluster.names import event_folder

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


def kept_end(run: str) -> dict[str, Any] | None:
    """Return how a run ended that was coordinated on this machine; None where none of that name was.

    Its ``state`` is "cut-off" where its last launch left no summary, and "unknown" where its storage cannot
    tell; ``committed`` is the newest step that a launch would go on from, ``missing`` one that is remembered
    here alone, where storage has no commit any more.
    """
    found = _last_launch(run)
    if found is None:
        return None
    term, job = found
    told: dict[str, Any] = {"run": run, "done": True, "gone": True, "term": term, "committed": None}
    if job is None:
        return {**told, "state": "unknown", "detail": "its config is of another version", "summary": None}
    try:
        storage = open_storage(job.storage, job.name)
        told["committed"] = _committed(storage)
    except PicotronError as error:
        return {**told, "state": "unknown", "detail": f"its storage does not tell: {error}", "summary": None}
    detail = f"its last launch left no summary in {storage.where}"
    known = known_here(run) if told["committed"] is None else None
    if known is not None and known.step:
        told["missing"] = known.step
        detail = f"its commits up to step {known.step} are not in {storage.where} any more"
    return {**told, "state": "cut-off", "detail": detail, "summary": None, **(stored_end(job, term) or {})}


def _last_launch(run: str) -> tuple[int, JobConfig | None] | None:
    """Newest term that the event logs here know, and the config it had; None where there are none."""
    logs = files.term_logs(event_folder(run))
    if not logs:
        return None
    term, head = files.read_head(logs[-1][0])
    try:
        return term, None if head is None else JobConfig.model_validate(head["job"])
    except (KeyError, ValidationError) as error:
        log.debug("the config of run %s cannot be read: %s", run, error)
        return term, None


def last_job(run: str) -> JobConfig | None:
    """Return the config of a run's newest launch on this machine; None where its logs know of none."""
    found = _last_launch(run) if re.fullmatch(RUN_NAME, run) else None
    return None if found is None else found[1]


def emptied_storage(run: str) -> str:
    """Return where a run's last launch here had its storage, where that holds no log any more; else ""."""
    found = _last_launch(run)
    if found is None or found[1] is None:
        return ""
    try:
        storage = open_storage(found[1].storage, run)
        return "" if any(storage.list("log/")) else storage.where
    except PicotronError as error:
        log.debug("the storage of run %s does not tell: %s", run, error)
        return ""


def _committed(storage: Storage) -> int | None:
    entries = RunLog(storage)
    entries.refresh()
    newest = newest_commit(entries)
    return int(newest.body["step"]) if newest else None


def find_end(run: str) -> dict[str, Any] | None:
    """Return how a run ended, as this machine or a node of the connected cluster knows; else None."""
    found = [kept_end(run)]
    if os.environ.get("RAY_ADDRESS"):
        from picotron_ray.runtime.ray_cluster.placement import ask_nodes, living_nodes  # imports Ray

        found += ask_nodes(living_nodes(), kept_end, run).values()
    return max(filter(None, found), key=lambda end: int(end["term"]), default=None)
