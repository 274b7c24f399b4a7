"""Beginning of a term: the machine's first event, and what arrives before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.lineage import slim
from picotron_ray.coordinator.replay import header_line
from picotron_ray.runtime.coordinator.admission import idle_workers
from picotron_ray.runtime.coordinator.event_log import files
from picotron_ray.runtime.coordinator.event_log.writer import EventLogWriter
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.supervision import Supervisor
from picotron_ray.runtime.run_storage.run_store import RunStore

Beginnings = tuple[
    dict[str, dict[str, Any]], bool, bytes | None, tuple[m.Commit, ...], tuple[m.GenerationSpec, ...]
]
"""What agents say by node, whether a generation runs, the record, and the log's commits and generations."""


class EarlyEvents:
    """Events from before ``Begin``, kept in order for after it.

    Storage may keep a term waiting for hours. So of heartbeats only each node's newest is kept, and what is
    told twice is kept once.
    """

    def __init__(self) -> None:
        self._events: dict[Any, m.Event] = {}

    def keep(self, event: m.Event) -> None:
        """Keep an event; ticks are none."""
        if isinstance(event, m.Heartbeat):
            self._events[event.node] = event
        elif not isinstance(event, m.Tick):
            self._events.setdefault(event, event)

    def take(self) -> list[m.Event]:
        """Return what was kept, and keep it no longer."""
        events, self._events = list(self._events.values()), {}
        return events


def begin_event(
    term: int,
    commits: tuple[m.Commit, ...],
    generations: tuple[m.GenerationSpec, ...],
    found: Mapping[str, dict[str, Any]],
    traits: Iterable[m.NodeTraits] = (),
    failed_s_ago: tuple[float, ...] = (),
    keeping: Mapping[str, int] | None = None,
    data: str = "",
    deaths: int = 0,
    **more: Any,
) -> m.Begin:
    """Return the first event of a term.

    Args:
        commits: those of the log, oldest first, as ``generations`` are.
        found: what the living agents say, by node.
        traits: of their nodes.
        failed_s_ago: failures of earlier terms within the last day.
        keeping: nodes that keep slots of an earlier launch, and their newest steps.
        data: fingerprint of the run's data; idle workers that see other data are left out.
        deaths: workers that earlier terms of this launch lost and did not replace.
        more: fields that it has as they are, as `RunRecord.past` and the launch's limit say.
    """
    kept_by = [slim(agent["kept_by"]) for agent in found.values() if agent.get("kept_by")]
    specs = [agent["spec"] for agent in found.values() if agent["spec"]]
    return m.Begin(
        term=term,
        commits=commits,
        generations=generations,
        running=max(specs, key=lambda spec: spec.id, default=None),
        workers=tuple(
            m.Member(worker, node)
            for node, agent in found.items()
            for usable in ({*idle_workers(agent, data), *(worker for worker, *_ in agent["busy"])},)
            for worker in agent["workers"]
            if worker in usable
        ),
        busy=tuple(
            m.BusyWorker(worker, m.GenerationId(its_term, n))
            for agent in found.values()
            for worker, its_term, n in agent["busy"]
        ),
        kept=tuple(slot for agent in found.values() for slot in agent.get("kept", ())),
        kept_by=max(kept_by, key=lambda spec: spec.id, default=None),
        traits=tuple(traits),
        failed_s_ago=failed_s_ago,
        keeping=dict(keeping or {}),
        deaths=deaths,
        step_s=max((agent.get("step_s", 0.0) for agent in found.values()), default=0.0),
        **more,
    )


async def open_event_log(
    job: JobConfig,
    options: Mapping[str, Any],
    planner: dict[str, Any],
    term: int,
    record: RunRecord,
    stored: bytes | None,
    identity: str,
    supervisor: Supervisor,
) -> EventLogWriter:
    """Have the record learn from the logs of earlier terms, and begin this one's.

    Args:
        options: of the coordinator; ``launch`` tells which of its terms belong to one launch.
        planner: what a replay needs to build the planner again.
        stored: newest record in storage; None: there is none.
        identity: tells the run from another one of its name (`RunLog.identity`).
        supervisor: hears of a log that cannot be read; the term begins all the same.
    """
    folder, launch = Path(options["event_folder"]), options.get("launch", "")
    try:
        memo, lines = await asyncio.to_thread(files.read_memory, folder, lambda: stored, term, identity)
        record.recall(memo, lines, launch)
    except (OSError, ValueError, KeyError, TypeError) as error:
        supervisor.failed("what earlier terms knew", error)
    offset_s = time.time() - time.monotonic()
    header = header_line(job, planner, launch=launch, offset_s=offset_s, identity=identity)
    return EventLogWriter(folder, term, header, record.memo, record.note)


def tell_beginning(record: RunRecord, options: Mapping[str, Any], store: RunStore) -> None:
    """Tell what launch and storage had to say before the term began."""
    told = [("info", "launch", line) for line in options.get("notes", ())]
    told += [("info", "init-from", line) for line in store.news]
    told += [("warning", "storage", complaint) for complaint in store.complaints]
    for words in told:
        record.note(*words)
