"""Coordinator: a thin Ray shell around the pure machine of ``picotron_ray.coordinator``.

One thread owns the machine and runs an event loop; whatever arrives (calls of agents and the driver,
results of actor calls, storage, time) becomes an event there, and each command the machine answers with
is carried out by a short method of its ``CommandExecutor``. Nothing here decides anything about the run, and
nothing blocks that thread. Every (time, event, commands) goes to a log that replays (``event_log``).

After a crash Ray runs the constructor again: a new term is claimed, living agents are asked what runs,
and the machine adopts it. No loop here ends by an error (``supervision``); an error of the machine itself
ends the process, which comes to the same.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.util import get_node_ip_address

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.term_claim import launch_of
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.storage_urls import redact_words
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.fenced_end import fenced_end
from picotron_ray.coordinator.machine import Machine
from picotron_ray.errors import FencedError, PicotronError, StorageError
from picotron_ray.planner.default_layout import default_planner
from picotron_ray.runtime.chaos.coordinator_chaos import CoordinatorChaos
from picotron_ray.runtime.coordinator.alert_service import AlertCalls
from picotron_ray.runtime.coordinator.beginning import (
    Beginnings,
    EarlyEvents,
    begin_event,
    open_event_log,
    tell_beginning,
)
from picotron_ray.runtime.coordinator.calibrations import Calibrations
from picotron_ray.runtime.coordinator.closing import close_nodes, leave, leave_to_successor
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.command_executor import CommandExecutor
from picotron_ray.runtime.coordinator.event_log.files import decode_record
from picotron_ray.runtime.coordinator.event_log.writer import EventLogWriter
from picotron_ray.runtime.coordinator.evidence import Evidence
from picotron_ray.runtime.coordinator.followers import Followers
from picotron_ray.runtime.coordinator.heartbeat_pages import read_heartbeat
from picotron_ray.runtime.coordinator.launch_limit import left
from picotron_ray.runtime.coordinator.log_service import CoordinatorLogs, LastLines
from picotron_ray.runtime.coordinator.metrics_service import MetricsService, targets_file
from picotron_ray.runtime.coordinator.operator_door import OperatorDoor
from picotron_ray.runtime.coordinator.owner_watch import OwnerWatch
from picotron_ray.runtime.coordinator.room_request import RoomRequest
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.storage_patience import StoragePatience
from picotron_ray.runtime.coordinator.telemetry import open_telemetry
from picotron_ray.runtime.coordinator.trackers import Tracking
from picotron_ray.runtime.node_agent.uploads import Ended
from picotron_ray.runtime.planning.process import PlannerProcess
from picotron_ray.runtime.ray_cluster.owner_process import POLL_S
from picotron_ray.runtime.ray_cluster.placement import living_nodes
from picotron_ray.runtime.run_storage.run_store import RunStore

log = logging.getLogger(__name__)
TICK_S = 0.25
MOST_PAGES = 256  # of workers, in the status of a follower; where there are more, it is rank 0's alone
NODE_POLL_S = 1.0
FLUSH_BYTES_PER_S = 500e6  # at least, with all ranks of a node at it


class Coordinator(AlertCalls, CoordinatorLogs, OperatorDoor):
    """Ray actor. Its methods run on several threads at a time and only hand over to the loop's thread."""

    def __init__(self, job: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(JobConfig.model_validate(job))
        self._options = options
        self._store = self._open_store()
        self._cluster = self._find_cluster()
        self._record = RunRecord(self._job)
        self._device = self._cluster.device()
        self._telemetry = open_telemetry(self._job, self._record, self._store.is_newest, self._device)
        self._followers = Followers()
        if options.get("submission"):
            self._record.attached(options["submission"])
        self._flush_s = options.get("slot_bytes", 0) / FLUSH_BYTES_PER_S
        default = default_planner(self._job, self._device)
        self._machine = Machine(self._job, default=default, flush_s=self._flush_s)
        self._planner = self._find_planner()
        self._event_log: EventLogWriter
        self._begun, self._early = False, EarlyEvents()
        self._tracking: Tracking | None = None
        self._metrics: MetricsService | None = None
        self._loop = asyncio.new_event_loop()
        self._executor = CommandExecutor(
            self._loop, self._cluster, self._store, self._record, self._dispatch, self._planner.ask
        )
        self._supervisor = self._executor.supervisor
        spawn = self._executor.spawn
        self._last_lines = LastLines(self._job, self._cluster, self._record.note, spawn)
        self._calibrations = Calibrations(self._job, self._device, self._record, spawn, living_nodes)
        self._evidence = Evidence(
            self._cluster.evidence,
            lambda: open_storage(self._job.storage, self._job.name),
            self._record.evidence,
        )
        self._chaos = CoordinatorChaos(self._job.chaos, self._store.claim_fault, self._cluster, spawn)
        threading.Thread(target=self._serve, name="coordinator", daemon=True).start()

    def _open_store(self) -> RunStore:
        get = self._options.get
        known = get("origin"), get("data", ""), launch_of(get("launch", ""), get("follows"))
        return RunStore(self._job, lambda step: self._chaos.committing(step), *known)

    def _find_planner(self) -> PlannerProcess:
        return PlannerProcess(self._job, self._device, self._post)

    def _find_cluster(self) -> Cluster:
        return Cluster(self._job, self._options.get("slot_bytes", 0))

    def _serve(self) -> None:
        self._executor.garbage.begin()
        asyncio.set_event_loop(self._loop)
        self._executor.spawn(self._supervisor.or_exit("the begin of a term", self._begin))
        if self._options.get("tied_to"):
            look = OwnerWatch(self._options["tied_to"], self._record, self._dispatch).look
            keep = partial(self._supervisor.keep, "the watch of the owner", look)
            self._executor.spawn(keep(lambda: not self._executor.ending, POLL_S))
        self._loop.run_forever()

    # --- called through Ray ------------------------------------------------------------------------------

    def status(self, since: int = 0, follower: str = "") -> dict[str, Any]:
        """Return the state of the run, as the driver shows it.

        Args:
            since: number of the last event that it has.
            follower: names whoever keeps asking until the end; ``waiting`` counts the others of them that
                have not heard of it yet. It is shown few pages: it asks twice a second.
        """
        found = self._record.status(since, MOST_PAGES if follower else None)
        if follower:
            found["waiting"] = self._followers.answered(follower, found["done"], time.monotonic())
        return found

    def attached(self, submission: dict[str, Any]) -> None:
        """Note a driver in a Ray job that follows the run; told again after every restart."""
        self._record.attached(submission)

    def request(self, what: str) -> None:
        """Ask for a ``stop`` (with a commit), the same for a ``requeue``, or a ``checkpoint``."""
        self._post(m.UserRequest(what))  # type: ignore[arg-type]

    def heartbeats(self, caller: str, beats: dict[str, list[dict[str, Any]]]) -> str:
        """Take the pages of living workers by node: the calling agent's, and those that it brings along.

        Returns the node whose agent is to carry the caller's heartbeats from now on; empty: none, it calls.
        """
        self._loop.call_soon_threadsafe(self._beaten, [self._heartbeat(*each) for each in beats.items()])
        return self._cluster.groups.called(caller, len(beats) - 1, time.monotonic())

    def _heartbeat(self, node: str, figures: list[dict[str, Any]]) -> m.Heartbeat:
        beat, pages, told = read_heartbeat(node, figures)
        self._telemetry.take(self._machine.memory.spec, told, time.monotonic(), pages)
        self._cluster.heard(node)
        self._record.figures(node, pages)
        return beat

    def agent_restarted(self, node: str, metrics: dict[str, str], why: str = "") -> None:
        """Hear that a node's agent has taken over what it found there: it had died, or ``why``."""
        self._cluster.agent_back(node, metrics)
        self._loop.call_soon_threadsafe(self._executor.agent_back, node)
        back = f"the agent of node {node[:8]} died and is back; its workers went on"
        self._record.note("warning", "agent", f"node {node[:8]}: {why}" if why else back)

    def sealed(self, node: str, generation: tuple[int, int], step: int, slots: list[m.SlotInfo]) -> None:
        """Hear that all members on a node sealed a pinned snapshot."""
        self._post(m.SnapshotSealed(node, m.GenerationId(*generation), step, tuple(slots)))

    def uploaded(self, node: str, end: Ended) -> None:
        """Hear how the upload of a node's slots ended."""
        self._loop.call_soon_threadsafe(self._executor.uploaded, node, end)

    def worker_exited(self, worker: str, cause: str) -> None:
        """Hear that a worker's process is gone."""
        self._post(m.WorkerExited(worker, cause))

    def stalled(self, worker: str, generation: list[int], phase: str, waited_s: float) -> None:
        """Hear that a worker is in a phase for longer than the phase's limit."""
        event = m.Stalled(worker, m.GenerationId(*generation), phase, waited_s)
        self._loop.call_soon_threadsafe(self._hear_stall, event)

    def evidence(self, node: str, generation: tuple[int, int], found: list[dict[str, Any]]) -> None:
        """Hear where workers were that are killed now."""
        entries = [{"node": node, **entry} for entry in found]
        self._loop.call_soon_threadsafe(
            self._evidence.add, m.GenerationId(*generation), entries, "did not leave in time"
        )

    def _beaten(self, events: list[m.Heartbeat]) -> None:
        for event in events:
            self._cluster.note_workers(event.node, (*event.steps, *event.others))
            self._dispatch(event)
        self._chaos.reached(max((step for event in events for step in event.steps.values()), default=0))

    # --- the loop's thread -------------------------------------------------------------------------------

    def _post(self, event: m.Event) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, event)

    def _hear_stall(self, event: m.Stalled) -> None:
        """Pass a stall on once it is known where all ranks are: what follows moves them."""
        spec = self._machine.memory.spec
        self._executor.spawn(self._evidence.heard(event, spec, self._dispatch))

    def _dispatch(self, event: m.Event) -> list[m.Command]:
        if self._executor.ending:
            return []
        if not self._begun and not isinstance(event, m.Begin):
            self._early.keep(event)
            return []
        now = time.monotonic()
        if isinstance(event, m.WorkerExited):
            self._last_lines.gone(event.worker)
        try:
            commands = self._machine.handle(event, now)
        except Exception as error:  # noqa: BLE001 (told by exit)
            self._supervisor.exit("the machine", error)
            return []
        if commands or not isinstance(event, m.Tick | m.Heartbeat):
            log.debug("%s -> %s", event, commands)
        self._observe(now, event, commands)
        for command in commands:
            if isinstance(command, m.Finish):
                self._executor.spawn(self._supervisor.or_exit("the end", partial(self._end, command)))
            else:
                self._supervisor.guarded(
                    f"command {type(command).__name__}", self._executor.carry_out, command
                )
        return commands

    def _observe(self, now: float, event: m.Event, commands: list[m.Command]) -> None:
        """Let everything follow that decides nothing; an error there keeps no command from being obeyed."""
        guarded = self._supervisor.guarded
        line = self._event_log.next_line if self._machine.eventful else 0
        guarded("the run's record", self._record.observe, event, commands, time.time(), line)
        if line:
            guarded("the event log", self._event_log.add, now, self._machine.slept_s, event, commands)
        else:
            guarded("the event log", self._event_log.quiet, now, event)
        guarded("telemetry", self._telemetry.observe, event, self._machine.memory, commands)
        guarded("calibration", self._calibrations.observe, self._machine.memory, event, commands)
        if self._tracking is not None:
            guarded("tracking", self._tracking.observe, event, commands)

    async def _learn(self) -> Beginnings:
        """Claim a term, once, and hear what the agents and the log say; may be done again."""
        patience = StoragePatience(self._job, self._cluster.activity, self._record.note)
        if not self._executor.term:
            self._executor.term = await patience.call(self._store.claim)
        self._cluster.run_identity, self._cluster.data = self._store.identity, self._store.data
        self._logs.learn(self._store.identity)
        found = await self._cluster.hello(self._executor.term, self._record.note, self._store.last_generation)
        running = any(agent["spec"] for agent in found.values())
        stored = await patience.call(partial(self._store.newest_record, decode_record))
        commits, specs = await patience.call(partial(self._store.state, not running))
        await patience.accept(self._store.unusable, partial(self._cluster.keeping, specs))
        return found, running, stored, commits, specs

    async def _begin(self) -> None:
        self._supervisor.folder = folder = Path(self._options["event_folder"])
        try:
            found, running, stored, commits, specs = await self._supervisor.retried("a begin", self._learn)
        except FencedError as error:
            await self._end(m.Finish("fenced", str(error), m.Source("slots")))
            return
        except PicotronError as error:
            failed = isinstance(error, StorageError)
            await self._end(m.Finish("storage" if failed else "failed", str(error), m.Source("slots")))
            return
        planner = {"device": self._device, "answers": "events", "flush_s": self._flush_s}
        term, record, store = self._executor.term, self._record, self._store
        known = (self._job, self._options, planner, term, record, stored, store.identity, self._supervisor)
        self._event_log = await open_event_log(*known)
        record.begin(term, store.commit_figures, lambda: self._machine.memory.checkpoints.committed)
        self._evidence.begin(term, folder)
        tell_beginning(record, self._options, store)
        self._tracking = Tracking(self._job, store, record, folder)
        if record.ended is not None:  # decided by a term that died on the way
            self._begun = True
            await self._end(record.ended)
            return
        kept = {} if running else await self._cluster.keeping(specs)
        limit = left(self._job.cluster, self._options.get("launched_s", time.time()), time.time())
        past = self._cluster.traits, record.failed_s_ago(), kept, store.data, record.deaths
        begin = await self._calibrations.begin(
            begin_event(term, commits, specs, found, *past, **(record.past() | limit))
        )
        self._cluster.adopt_workers(begin.workers)
        self._begun = True
        for event in (begin, *self._early.take(), *self._record.owed):
            self._dispatch(event)
        self._start_loops(folder)

    def _start_loops(self, folder: Path) -> None:
        def going() -> bool:
            return not self._executor.ending

        keep = self._supervisor.keep
        self._executor.spawn(keep("ticks", self._tick, going, TICK_S))
        self._executor.spawn(self._watch_nodes(going))
        self._executor.spawn(keep("the watch of drains", self._watch_drains, going, NODE_POLL_S))
        if self._job.metrics.enabled:
            self._executor.spawn(keep("metrics", partial(self._serve_metrics, folder), going, NODE_POLL_S))

    async def _tick(self) -> None:
        for event in (m.Tick(), *self._telemetry.due(self._machine.memory.spec, time.monotonic())):
            self._dispatch(event)
        self._record.waits, self._record.orders = self._machine.waits, self._machine.orders

    async def _watch_nodes(self, going: Callable[[], bool]) -> None:
        room = RoomRequest()
        work = partial(self._look_at_nodes, room)
        await self._supervisor.keep("the watch of nodes", work, going, NODE_POLL_S)
        room.clear()

    async def _look_at_nodes(self, room: RoomRequest) -> None:
        for event in await self._cluster.changes(self._executor.term):
            self._dispatch(event)
        if self._job.cluster.autoscale:
            wanted = self._machine.view.missing, self._cluster.needs
            await asyncio.to_thread(room.update, *wanted, time.monotonic())

    async def _watch_drains(self) -> None:
        """Tell the machine of nodes that are to go until it knows; slow joins do not delay it."""
        for notice in await self._cluster.drains():
            if notice.node not in self._machine.view.draining:
                self._dispatch(notice)

    async def _serve_metrics(self, event_folder: Path) -> None:
        file = targets_file(event_folder)
        if self._metrics is None:
            self._metrics = MetricsService(
                self._job, self._record, lambda: self._machine.memory, get_node_ip_address(), file
            )
        await self._metrics.keep(lambda: self._cluster.metrics, lambda: not self._executor.ending)

    # --- the end -----------------------------------------------------------------------------------------

    async def _end(self, finish: m.Finish) -> None:
        """Stop everything of the run, write the summary, answer the driver's next question with it.

        Where a newer coordinator has taken over, the run is its to end. Only if that one is not of this
        cluster (the same name and storage are used elsewhere) what is here still goes.
        """
        finish = replace(finish, detail=redact_words(finish.detail))
        self._executor.ending = True
        self._planner.close()
        term = self._executor.term
        if finish.status != "fenced" and term and await self._executor.is_newest() is False:
            finish = fenced_end(self._store.overtaken_by, self._job.name)
        if finish.status == "fenced" or not term:  # whose it is, is in doubt
            await leave_to_successor(self._job.name, finish)
        finish = await close_nodes(self._cluster, self._record, self._job.name, term, finish)
        summary = self._record.summary(finish)
        if finish.status not in ("fenced", "storage"):
            summary = await self._summed_up(summary)
        self._record.done(finish, summary)
        self._store.close(finish.status)
        if self._begun:
            await asyncio.to_thread(self._event_log.close)
        await asyncio.to_thread(self._logs.close)
        await leave(self._job, self._options["owns_ray"], finish)

    async def _summed_up(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Store the summary, and end the trackers; returns it with what the ledger says."""
        if self._begun:  # with figures that are younger than the last commit
            await asyncio.to_thread(self._executor.keeper.finish, self._job.storage.final_wait_s)
            await asyncio.to_thread(self._telemetry.finish, self._job.storage.final_wait_s)
        try:
            summary = await asyncio.to_thread(self._store.finish, summary)
        except (StorageError, FencedError) as error:
            log.warning("summary not written: %s", error)
        if self._tracking is not None:
            await self._tracking.finish(summary["status"])
        targets_file(Path(self._options["event_folder"])).unlink(missing_ok=True)
        return summary
