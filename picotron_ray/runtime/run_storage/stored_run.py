"""A run as its storage alone tells it, whether it goes on, has ended, or died without an end.

Nothing is written, and no cluster is asked. Objects that are torn or gone cost what they say, and are named
in ``complaints``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from picotron_ray.checkpoint.storage.base import JSON_BYTES, Storage, get_bounded, get_json
from picotron_ray.checkpoint.store.commit import parent_of
from picotron_ray.checkpoint.store.lineage import newest_generation
from picotron_ray.checkpoint.store.outline import Outline
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import stream_ledger
from picotron_ray.errors import CorruptError, NotFoundError
from picotron_ray.runtime.coordinator.event_log.files import decode_record
from picotron_ray.runtime.coordinator.event_log.memo import read_facts
from picotron_ray.runtime.coordinator.records import Facts
from picotron_ray.runtime.run_storage.life_sign import PREFIX as LIVES
from picotron_ray.runtime.run_storage.life_sign import SILENT_S
from picotron_ray.runtime.run_storage.run_json import NEWEST
from picotron_ray.runtime.run_storage.run_store import RECORDS
from picotron_ray.runtime.run_storage.telemetry_archive import ArchivedTelemetry, read_archive

CUT_OFF = "cut-off"
"""State of a run that died without an end."""
MOST_STEPS = 2000
"""Points of a curve by steps; of a longer run each stands for several steps."""
MOST_LEDGER_STEPS = 200_000
"""Steps of a ledger that is read for curves; a longer one's are those of the windows."""


class StepPoint(NamedTuple):
    """A step, or the mean of some, as the ledger has them.

    Fields:
        at_s: seconds since the epoch; 0: not known.
    """

    step: int
    at_s: float
    loss: float
    grad_norm: float | None


@dataclass(frozen=True, slots=True)
class Vitals:
    """State of a run.

    Fields:
        state: running, finished, stopped, failed, storage or fenced; `CUT_OFF`; "starting" before any sign.
        updated_s: newest sign of it, in seconds since the epoch by the storage's clock; 0: none.
    """

    state: str
    updated_s: float


@dataclass(slots=True)
class StoredRun:
    """What storage holds of a run.

    Fields:
        config: of its newest launch, without secrets.
        environment: version and package of that launch, and what else it told of where it ran.
        memo: the coordinator's record as of the newest commit, or the end; None: there is none.
        facts: of that record.
        summary: of the last launch that ended in order; None: none did.
        steps: curve by steps; empty where no ledger can be read.
        complaints: what could not be read.
    """

    name: str
    where: str
    vitals: Vitals
    config: dict[str, Any]
    environment: dict[str, Any]
    memo: dict[str, Any] | None = None
    facts: Facts | None = None
    summary: dict[str, Any] | None = None
    telemetry: ArchivedTelemetry = field(default_factory=ArchivedTelemetry)
    steps: list[StepPoint] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def read_stored_run(storage: Storage, name: str, now_s: float | None = None) -> StoredRun:
    """Read a run, with its telemetry and curves.

    Args:
        now_s: seconds since the epoch; None: now.

    Raises:
        NotFoundError: there is no run.
        StorageError: storage does not answer.
    """
    run = read_brief(storage, name, now_s)
    run.telemetry = read_archive(storage)
    run.complaints += run.telemetry.complaints
    try:
        run.steps = list(_curve(storage))
    except (NotFoundError, CorruptError) as error:
        run.complaints.append(f"the ledger cannot be read: {error}")
    return run


def read_brief(storage: Storage, name: str, now_s: float | None = None) -> StoredRun:
    """Read a run without its telemetry and curves; raises as `read_stored_run`."""
    first = get_json(storage, "run.json")
    with suppress(NotFoundError, CorruptError):
        first = {**first, **get_json(storage, NEWEST)}
    complaints: list[str] = []
    summary = _summary(storage, complaints)
    vitals = _vitals(storage, summary, time.time() if now_s is None else now_s)
    environment = {key: value for key, value in first.items() if key not in ("config", "origin")}
    run = StoredRun(name, storage.where, vitals, dict(first["config"]), environment, summary=summary)
    run.complaints = complaints
    run.memo, at_s = _newest_record(storage, complaints)
    if run.memo is not None:
        try:
            run.facts = read_facts(
                json.loads(json.dumps(run.memo["facts"])), run.memo["began_s"], run.memo["wall_s"]
            )
        except (ValueError, KeyError, TypeError) as error:
            complaints.append(f"the run's record is of another version: {error!r}")
    run.vitals = Vitals(vitals.state, max(vitals.updated_s, at_s))
    return run


def _summary(storage: Storage, complaints: list[str]) -> dict[str, Any] | None:
    try:
        return get_json(storage, "summary.json")
    except NotFoundError:
        return None
    except CorruptError as error:
        complaints.append(str(error))
        return None


def _vitals(storage: Storage, summary: dict[str, Any] | None, now_s: float) -> Vitals:
    """Judge by the newest sign of life, and by the summary of the launch that it is of."""
    signs = list(storage.list(LIVES))
    ended = "" if summary is None else str(summary["status"])
    if not signs:
        return Vitals(ended or "starting", 0.0)
    newest = signs[-1]
    try:
        said = get_json(storage, newest.key)
    except (NotFoundError, CorruptError):
        said = {"ended": "", "term": 0}
    if said["ended"] or (summary is not None and summary.get("term", 0) >= said["term"] > 0):
        return Vitals(str(said["ended"]) or ended, newest.mtime_s)
    return Vitals("running" if now_s - newest.mtime_s < SILENT_S else CUT_OFF, newest.mtime_s)


def _newest_record(storage: Storage, complaints: list[str]) -> tuple[dict[str, Any] | None, float]:
    """Return the newest record that can be read, and when it was stored."""
    found = sorted(storage.list(RECORDS), key=lambda entry: entry.key, reverse=True)
    for entry in found:
        try:
            record = decode_record(get_bounded(storage, entry.key, JSON_BYTES))
        except (NotFoundError, CorruptError):
            record = None
        if record is not None:
            return record, entry.mtime_s
        complaints.append(f"{entry.key} is torn or gone")
    return None, 0.0


def ledger_outline(storage: Storage) -> Outline | None:
    """Return the outline of the newest commit of the run's history; None before one.

    Raises:
        CorruptError, NotFoundError: it cannot be read.
    """
    log = RunLog(storage)
    log.refresh()
    newest = newest_generation(log)
    return None if newest is None else parent_of(storage, log, *newest)


def _curve(storage: Storage) -> Iterator[StepPoint]:
    """Yield at most `MOST_STEPS` points of the committed ledger."""
    outline = ledger_outline(storage)
    if outline is None or not outline.ledger or outline.ledger[-1].last > MOST_LEDGER_STEPS:
        return
    each = -(-outline.ledger[-1].last // MOST_STEPS)
    held: list[dict[str, Any]] = []
    for text in stream_ledger(storage, outline):
        line = json.loads(text)
        if line.get("loss") is not None:
            held.append(line)
        if len(held) >= each:
            yield _point(held)
            held = []
    if held:
        yield _point(held)


def _point(lines: list[dict[str, Any]]) -> StepPoint:
    norms = [line["grad_norm"] for line in lines if line.get("grad_norm") is not None]
    return StepPoint(
        lines[-1]["step"],
        lines[-1].get("at_s") or 0.0,
        sum(line["loss"] for line in lines) / len(lines),
        sum(norms) / len(norms) if norms else None,
    )
