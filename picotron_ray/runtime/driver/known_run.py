"""Memory that this machine has of a run, against what the storage of a launch holds.

A mount point without its disk, or another folder, looks like a run that never was, and would begin at step 0
and have the logs and the trackers' files of the real one cleared. The event logs on the coordinator's machine
know that run's identity, its storage and its commits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from picotron_ray.checkpoint.storage.base import JSON_BYTES, Storage, get_bounded
from picotron_ray.checkpoint.store.run_log import decode_entry, entry_key
from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.errors import ConfigError, CorruptError, NotFoundError, StorageError
from picotron_ray.runtime.coordinator.event_log import files
from picotron_ray.runtime.coordinator.event_log.memo import observations
from picotron_ray.runtime.driver.consent import COMMAND, Options
from picotron_ray.runtime.ray_cluster.connect import run_folders
from picotron_ray.runtime.ray_cluster.kept_slots import kept_step
from picotron_ray.runtime.ray_cluster.names import event_folder

log = logging.getLogger(__name__)


class KnownRun(NamedTuple):
    """A run as a machine's event logs have it.

    Fields:
        term: the newest.
        url: its ``storage.url``, without secrets.
        step: newest commit; 0: there was none.
        committed_at_s: when that was heard of, in seconds since the epoch.
        finished: it reached its last step.
    """

    term: int
    url: str
    step: int
    committed_at_s: float
    finished: bool


def known_here(run: str, identity: str = "") -> KnownRun | None:
    """Return what the event logs of this machine say; None where they say nothing.

    Args:
        identity: of the run in storage; None is returned too where the logs are its own, or do not tell.
    """
    try:
        return _read(event_folder(run), identity)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("the event logs of run %s cannot be read: %s", run, error)
        return None


def _read(folder: Path, identity: str) -> KnownRun | None:
    logs = files.term_logs(folder)
    term, head = files.read_head(logs[-1][0]) if logs else (0, None)
    if head is None or (identity and head.get("identity", identity) == identity):
        return None
    facts = (files.read_record(folder) or {}).get("facts", {})  # also of what the logs are too long for
    step = max((int(commit["step"]) for commit in facts.get("checkpoints", ())), default=0)
    at_s, finished = float(facts.get("committed_at_s") or 0.0), False
    for _, event, commands, now_s in observations(files.lines_since(folder, None)):
        if isinstance(event, m.Begin):
            finished = False
        found = max(_committed(event), default=0)
        if found > step:
            step, at_s = found, now_s
        finished = finished or any(isinstance(c, m.Finish) and c.status == "finished" for c in commands)
    return KnownRun(term, head["job"]["storage"]["url"], step, at_s, finished)


def _committed(event: m.Event) -> Iterable[int]:
    if isinstance(event, m.Begin):
        return [commit.step for commit in event.commits]
    return [event.step] if isinstance(event, m.Appended) and event.kind == "commit" and event.seq else []


def check_known_run(
    job: JobConfig, storage: Storage, own_ray: bool, relative: bool = False, options: Options = COMMAND
) -> str:
    """Refuse to begin anew in place of a run that has commits, as this machine knows; returns a note.

    Refused is a launch that finds its run's own ``storage.url`` empty, and one from another folder that
    misses an unfinished run. Otherwise a name is taken to be used again on purpose, which is noted.

    Args:
        own_ray: else the nodes of the connected cluster are asked too: one of them had the coordinator.
        relative: ``storage.url`` depends on the folder that the launch was called from.
        options: what the door calls the one that begins all the same.

    Raises:
        ConfigError: the storage holds nothing of that run.
    """
    try:
        identity = decode_entry(1, get_bounded(storage, entry_key(1), JSON_BYTES)).nonce
    except NotFoundError:
        identity = ""
    except (CorruptError, StorageError):
        return ""  # it does not tell; whoever uses it next says so
    known = _newest_known(job.name, identity, own_ray)
    if known is None or not known.step:
        return ""
    if kept_step(run_folders(job)) is not None:
        return ""  # slots are at stake, of which `check_same_run` tells
    seen = f"another run of the name {job.name!r}" if identity else f"nothing of run {job.name!r}"
    when = f"{datetime.fromtimestamp(known.committed_at_s, UTC):%Y-%m-%d %H:%M} UTC"
    expected = f"its commits up to step {known.step} (heard of on {when}) in {known.url}"
    same = known.url == public_dict(job)["storage"]["url"]
    if identity or not (same or (relative and not known.finished)):
        return f"storage.url: {storage.where} has {seen}; the one that this machine remembers has {expected}"
    raise ConfigError(
        f"storage.url: saw {seen} in {storage.where}, expected {expected}, as remembered here; mount or"
        f" restore it, or give that storage.url; to begin at step 0 on purpose, give {options.begin_anew}"
        " or choose another name"
    )


def _newest_known(run: str, identity: str, own_ray: bool) -> KnownRun | None:
    found = [known_here(run, identity)]
    if own_ray:
        return found[0]
    from picotron_ray.runtime.ray_cluster.placement import ask_nodes, connected, living_nodes

    if connected():
        found += ask_nodes(living_nodes(), known_here, run, identity).values()
    return max((known for known in found if known), key=lambda known: known.term, default=None)
