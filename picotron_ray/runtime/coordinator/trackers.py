"""Trackers of the run: fed from the committed ledger, on a thread of their own.

The ledger is read on the thread of the run's storage, like everything of the log. It is written to the
trackers on this one. A tracker that fails (a server that is away, a full disk) costs the run nothing. The
failure is an event, and the next commit brings the tracker all rows since the last that it took.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from picotron_ray.config.export import flatten, public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import TrackerConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.observability.remote_trackers import folder_of, open_tracker
from picotron_ray.observability.tracker_owner import take_folder
from picotron_ray.observability.trackers import Row, Tracker, row_of
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.span_export import SpanExport
from picotron_ray.runtime.run_storage.run_store import RunStore

log = logging.getLogger(__name__)
END_TIMEOUT_S = 30.0


def tracker_folder(event_folder: Path) -> Path:
    """Return the folder for trackers whose config names none."""
    return event_folder.parent / "trackers"


class Tracking:
    """Feeder of trackers; ``observe`` and ``finish`` are called on the coordinator's loop, never block it."""

    def __init__(self, job: JobConfig, store: RunStore, record: RunRecord, event_folder: Path) -> None:
        self._job, self._store, self._record = job, store, record
        self._folder = tracker_folder(event_folder)
        self._trackers: dict[int, Tracker] = {}  # by number in the config, once it could be opened
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trackers") if job.trackers else None
        self._spans = SpanExport(job, record) if job.telemetry.otel.endpoint else None
        self._submit(self._catch_up)

    def observe(self, event: m.Event, commands: list[m.Command]) -> None:
        """Follow what the machine handled: commits bring rows, and a generation may go back behind some."""
        if isinstance(event, m.Appended) and event.kind == "commit" and event.seq:
            self._submit(self._catch_up)
        if self._spans is not None:
            self._spans.observe(event, commands, time.time())
        for command in commands:
            if isinstance(command, m.RunGeneration):
                self._submit(self._rewind, command.spec.resume_step)

    async def finish(self, status: str) -> None:
        """Write the last rows and end every tracker; gives up after ``END_TIMEOUT_S``."""
        if self._spans is not None:
            await asyncio.to_thread(self._spans.finish, status)
        if self._thread is None:
            return
        for work in (self._catch_up, self._close):
            done = self._submit(work)
            if done is not None:
                await asyncio.wait([asyncio.wrap_future(done)], timeout=END_TIMEOUT_S)
        self._thread.shutdown(wait=False)

    def _submit(self, work: Callable[..., None], *arguments: int) -> Future[None] | None:
        if self._thread is None:
            return None
        done = self._thread.submit(work, *arguments)
        done.add_done_callback(self._ended)
        return done

    def _ended(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            log.warning("a tracker failed", exc_info=error)
            self._record.note("warning", "tracker", f"tracker: {type(error).__name__}: {error}")

    # --- on the trackers' thread ---------------------------------------------------------------------------

    def _catch_up(self) -> None:
        evaluations = self._record.measured().evaluations
        for index, config in enumerate(self._job.trackers):
            tracker = self._trackers.get(index) or self._open(index, config)
            reading = self._store.committer.submit(self._store.ledger_lines, tracker.last_step)
            rows = [row_of(line) for line in reading.result()]
            reached = max([tracker.last_step, *(row["step"] for row in rows)])
            held_out: list[Row] = [
                {"step": step, "eval_loss": loss}
                for step, loss in sorted(evaluations.items())
                if tracker.last_eval_step < step <= reached
            ]
            if rows or held_out:
                tracker.write(rows, held_out)

    def _open(self, index: int, config: TrackerConfig) -> Tracker:
        settings = flatten(public_dict(self._job))
        identity = self._taken(config)
        self._trackers[index] = open_tracker(config, self._job.name, settings, self._folder, identity)
        return self._trackers[index]

    def _taken(self, config: TrackerConfig) -> str:
        """Take the tracker's folder for this run, whose identity it returns; says what was there before."""
        folder, identity = folder_of(config, self._folder), self._store.identity
        if line := take_folder(folder, self._job.name, identity):
            self._record.note("info", "tracker", line)
        return identity

    def _rewind(self, step: int) -> None:
        for tracker in self._trackers.values():
            if max(tracker.last_step, tracker.last_eval_step) > step:
                tracker.rewind(step)

    def _close(self) -> None:
        for tracker in self._trackers.values():
            tracker.close()
