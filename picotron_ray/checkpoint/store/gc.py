"""Retention and garbage collection of the store, by the coordinator alone. Torch-free.

A chunk may be deleted only when no commit needs it *and* no save under way may count on it. Saves run
on other machines, so:

1. commits beyond retention get a ``retire`` entry in the log;
2. chunks and manifests that nothing retained names are published in a condemned list; from then on
   writers treat those chunks as absent and put them again;
3. after the grace time (longer than a save may take) what is retained *and* what live intents name is
   marked again, and the rest of the list is deleted, unless it was written again since the list;
4. the list is removed.

An intent that does not list its chunks yet (a save under way) postpones step 3; an intent older than
the grace time is a dead save. A writer that sleeps longer than that finds its chunks gone when the
coordinator looks for them before the commit. Nothing here runs while a commit is being made: both are the
same coordinator's. Times are the storage's own.

A collector of an old term that sleeps and wakes up is stopped by the log: it reads on there before a
deletion wherever more than a moment has passed since it last did. A successor may have committed meanwhile
what was condemned, put again by its writers. A deletion that hangs is given up, and may happen later:
no commit of this process counts on its object before that (``commit``).
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, StoredObject, clock_s, encode_json, get_json
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.lineage import commits_on
from picotron_ray.checkpoint.store.outline import Outlines
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import CorruptError, FencedError, NotFoundError, StorageUnavailableError

_LONGEST_DELETE_S = 60.0
_KNOWN_S = 2.0
"""Time for which what the log says counts as known: a successor takes longer from its claim to a commit."""
_MOST_CHECKS = 3


@dataclass(frozen=True, slots=True)
class GcReport:
    """Report of one collection.

    Fields:
        retired: manifests that retention gave up.
        postponed: why a due list was left, "" where none was.
        damaged: a line for each commit that was given up because its manifest cannot be read.
    """

    retired: tuple[str, ...] = ()
    condemned: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    postponed: str = ""
    damaged: tuple[str, ...] = ()


def rewind_reach(job: JobConfig) -> int:
    """Steps that a rewind goes back from a bad step; 0 where the config asks for none."""
    elastic = job.elastic
    return elastic.rewind_steps if "rewind" in (elastic.on_nonfinite, elastic.on_spike) else 0


def retained(
    log: RunLog, config: CheckpointConfig, damaged: Collection[int] = (), reach_steps: int = 0
) -> list[Entry]:
    """Commits that retention keeps.

    Those are the newest ones, those at multiples of ``keep_every_steps``, the newest commit that the newest
    generation descends from, as its ledger continues there, and those that the next rewind may go back to.

    Args:
        damaged: numbers of entries whose manifest cannot be read; they are not kept and fill no place.
        reach_steps: how far a rewind goes back from the step after the newest commit, at least.
    """
    commits = [entry for entry in log.commits() if entry.seq not in damaged]
    keep = {entry.seq for entry in commits[-config.keep_last :]}
    if config.keep_every_steps:
        keep |= {e.seq for e in commits if e.body["step"] % config.keep_every_steps == 0}
    if reach_steps and commits:
        bad_step = commits[-1].body["step"] + 1
        early = [e.body["step"] for e in commits if e.body["step"] <= bad_step - reach_steps]
        keep |= {e.seq for e in commits if e.body["step"] >= max(early, default=0)}
    generations = [entry for entry in log.entries() if entry.kind == "generation"]
    if generations:
        newest = generations[-1].body
        keep |= {e.seq for e in commits_on(log.entries(), commits, (newest["term"], newest["n"]))[-1:]}
    return [entry for entry in commits if entry.seq in keep]


def collect(
    storage: Storage,
    log: RunLog,
    config: CheckpointConfig,
    reach_steps: int = 0,
    outlines: Outlines | None = None,
) -> GcReport:
    """Retire commits, delete what was condemned long enough ago, condemn what is not needed any more.

    The log must hold a claimed term. With a grace time of 0 one call does all of it.

    Args:
        reach_steps: as for `retained`.
        outlines: of manifests that are known already; others are added.

    Raises:
        FencedError: a newer term was claimed.
        StorageError: the storage refused, or no manifest at all can be read (nothing is deleted).
    """
    log.refresh()
    outlines = outlines or Outlines()
    damaged = damaged_commits(storage, log, outlines)
    retired = _retire(log, config, damaged, reach_steps)
    condemned = 0 if list(storage.list("condemned/")) else _condemn(storage, log, config, outlines)
    now = _now(storage)
    postponed, deleted, freed = "", 0, 0
    for listed in list(storage.list("condemned/")):
        if now - listed.mtime_s < config.gc_grace_s:
            continue
        postponed = _live_unlisted(storage, now, config.gc_grace_s)
        if postponed:
            break
        count, size = _delete(storage, log, config, outlines, listed, now)
        deleted, freed = deleted + count, freed + size
    return GcReport(retired, condemned, deleted, freed, postponed, tuple(damaged.values()))


def damaged_commits(storage: Storage, log: RunLog, outlines: Outlines) -> dict[int, str]:
    """Commits that no state can be restored from, as their manifest is missing or damaged: number → why.

    Raises:
        CorruptError: that is all of them: it may be the storage that is the wrong one.
    """
    found: dict[int, str] = {}
    commits = log.commits()
    sizes = {entry.key: entry.size for entry in storage.list("manifests/")}
    for entry in commits:
        look = partial(_unreadable, storage, entry, outlines, sizes)
        if look() and (problem := look()):  # also the second time
            found[entry.seq] = problem
    if found and len(found) == len(commits):
        raise CorruptError(f"{found[commits[-1].seq]}; no commit is readable, nothing was collected")
    return found


def _unreadable(storage: Storage, entry: Entry, outlines: Outlines, sizes: Mapping[str, int]) -> str:
    try:
        outlines.check_there(storage, entry.body, sizes)
    except CorruptError as error:
        return str(error)
    return ""


def _retire(
    log: RunLog, config: CheckpointConfig, damaged: Collection[int], reach_steps: int
) -> tuple[str, ...]:
    keep = {entry.seq for entry in retained(log, config, damaged, reach_steps)}
    kept_manifests = {e.body["manifest"] for e in log.commits() if e.seq in keep}
    manifests = {e.body["manifest"] for e in log.commits() if e.seq not in keep} - kept_manifests
    if manifests:
        log.append("retire", {"manifests": sorted(manifests)})
    return tuple(sorted(manifests))


def _marked(storage: Storage, log: RunLog, intents: Iterable[dict[str, Any]], outlines: Outlines) -> set[str]:
    """Keys that are needed: of retained commits and of live intents."""
    keys: set[str] = set()
    for entry in log.commits():
        keys.add(entry.body["manifest"])
        keys.update(outlines.committed(storage, entry.body).chunk_keys())
    for intent in intents:
        keys.update(chunk_key(address) for address in intent["chunks"] or ())
    return keys


def _condemn(storage: Storage, log: RunLog, config: CheckpointConfig, outlines: Outlines) -> int:
    now = _now(storage)
    marked = _marked(storage, log, _live_intents(storage, now, config.gc_grace_s), outlines)
    unused = [e for p in ("chunks/", "manifests/") for e in storage.list(p) if e.key not in marked]
    if not unused:
        return 0
    value = {
        "chunks": [e.key.rpartition("/")[2] for e in unused if e.key.startswith("chunks/")],
        "manifests": [e.key for e in unused if e.key.startswith("manifests/")],
    }
    storage.put(f"condemned/{log.term}-{uuid.uuid4().hex}.json", encode_json(value))
    return len(unused)


def _delete(
    storage: Storage,
    log: RunLog,
    config: CheckpointConfig,
    outlines: Outlines,
    listed: StoredObject,
    now: float,
) -> tuple[int, int]:
    value = get_json(storage, listed.key)
    doomed = {chunk_key(address) for address in value["chunks"]} | set(value["manifests"])
    doomed -= _marked(storage, log, _live_intents(storage, now, config.gc_grace_s), outlines)
    there = [entry for prefix in ("chunks/", "manifests/") for entry in storage.list(prefix)]
    old = [entry for entry in there if entry.key in doomed and entry.mtime_s < listed.mtime_s]
    begun = time.monotonic()
    checked = -math.inf
    for entry in old:
        if time.monotonic() - begun > _LONGEST_DELETE_S:  # this process slept: what it knows may be old
            raise StorageUnavailableError(f"{storage.where}: collection took too long and was left for later")
        if time.monotonic() - checked > _KNOWN_S:
            checked = _still_newest(storage, log)
        storage.delete(entry.key)
    _drop_dead_intents(storage, now, config.gc_grace_s)
    storage.delete(listed.key)
    return len(old), sum(entry.size for entry in old)


def _still_newest(storage: Storage, log: RunLog) -> float:
    """Read what is new in the log until its answer is fresh; returns when that was asked for.

    All of the log would take longer than an answer is fresh, where it is long.

    Raises:
        FencedError: a newer term was claimed.
        StorageUnavailableError: the log takes too long to answer.
    """
    for _ in range(_MOST_CHECKS):
        asked = time.monotonic()
        _check_term(log)
        if time.monotonic() - asked <= _KNOWN_S:
            return asked
    raise StorageUnavailableError(f"{storage.where}: the log is read too slowly; collection is put off")


def _check_term(log: RunLog) -> None:
    log.read_on()
    newest = max(entry.term for entry in log.entries())
    if newest > log.term:
        raise FencedError(f"term {newest} was claimed, this collector has term {log.term}; stop")


def _live_intents(storage: Storage, now: float, grace_s: float) -> list[dict[str, Any]]:
    live = []
    for entry in _intents(storage, now, grace_s, dead=False):
        try:
            live.append(get_json(storage, entry.key))
        except NotFoundError:  # its save ended since the listing
            continue
    return live


def _live_unlisted(storage: Storage, now: float, grace_s: float) -> str:
    unlisted = sum(intent["chunks"] is None for intent in _live_intents(storage, now, grace_s))
    return f"{unlisted} saves are under way" if unlisted else ""


def _intents(storage: Storage, now: float, grace_s: float, dead: bool) -> Sequence[StoredObject]:
    return [e for e in storage.list("intents/") if (now - e.mtime_s > max(grace_s, 60.0)) == dead]


def _drop_dead_intents(storage: Storage, now: float, grace_s: float) -> None:
    for entry in _intents(storage, now, grace_s, dead=True):
        storage.delete(entry.key)


def _now(storage: Storage) -> float:
    """The storage's clock."""
    return clock_s(storage)
