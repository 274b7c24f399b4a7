"""Coordinator: a thin Ray shell around the pure machine of ``picotron_ray.coordinator``.

One thread owns the machine and runs an event loop; whatever arrives (calls of agents and the driver,
results of actor calls, storage, time) becomes an event there, and each command the machine answers with
is carried out by a short method of its ``CommandExecutor``. Nothing here decides anything about the run.
Nothing that blocks runs on that thread. Every (time, event, commands) goes to a log file that replays.

After a crash Ray runs the constructor again: a new term is claimed, living agents are asked what runs,
and the machine adopts it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address

from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.replay import event_line, header_line
from picotron_ray.errors import PicotronError, StorageError
from picotron_ray.planner.search import planner
from picotron_ray.runtime.chaos.coordinator_chaos import CoordinatorChaos
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.command_executor import CommandExecutor
from picotron_ray.runtime.coordinator.followers import Followers
from picotron_ray.runtime.coordinator.metrics_service import MetricsService, targets_file
from picotron_ray.runtime.coordinator.room_request import RoomRequest
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.storage_patience import StoragePatience
from picotron_ray.runtime.coordinator.trackers import Tracking
from picotron_ray.runtime.ray_cluster import kept_slots, local_ray, owner_process
from picotron_ray.runtime.ray_cluster.connect import run_folders
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, coordinator_name
from picotron_ray.runtime.ray_cluster.placement import living_nodes, worker_needs
from picotron_ray.runtime.ray_cluster.supervisor import LINGER_S
from picotron_ray.runtime.run_storage.run_store import RunStore

log = logging.getLogger(__name__)
TICK_S = 0.25
NODE_POLL_S = 1.0


class Coordinator:
    """Ray actor. Its methods run on several threads at a time and only hand over to the loop's thread."""

    def __init__(self, job: dict[str, Any], options: dict[str, Any]) -> None:
        self._job = JobConfig.model_validate(job)
        self._options = options
        self._store = RunStore(self._job, lambda step: self._chaos.committing(step), options.get("origin"))
        self._cluster = Cluster(self._job, options.get("slot_bytes", 0))
        self._record = RunRecord(self._job)
        self._followers = Followers()
        if options.get("submission"):
            self._record.attached(options["submission"])
        gpus = worker_needs(self._job.cluster, living_nodes()).gpus
        self._device = "cuda" if gpus else "cpu"
        self._machine = Machine(self._job, planner(self._job, self._device))
        self._event_log: Path | None = None
        self._tracking: Tracking | None = None
        self._loop = asyncio.new_event_loop()
        self._executor = CommandExecutor(self._loop, self._cluster, self._store, self._record, self._dispatch)
        self._chaos = CoordinatorChaos(
            self._job.chaos, self._store.claim_fault, self._cluster, self._executor.spawn
        )
        threading.Thread(target=self._serve, name="coordinator", daemon=True).start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._executor.spawn(self._begin())
        if self._options.get("tied_to"):
            self._executor.spawn(self._end_with(self._options["tied_to"]))
        self._loop.run_forever()

    # --- called through Ray ------------------------------------------------------------------------------

    def status(self, since: int = 0, follower: str = "") -> dict[str, Any]:
        """Return the state of the run, as the driver shows it.

        Args:
            since: number of the last event that it has.
            follower: names whoever keeps asking until the end; ``waiting`` counts the others of them that
                have not heard of it yet.
        """
        found = self._record.status(since)
        if follower:
            found["waiting"] = self._followers.answered(follower, found["done"], time.monotonic())
        return found

    def config(self) -> dict[str, Any]:
        """Return the config that the run goes on with, without secrets."""
        return public_dict(self._job)

    def attached(self, submission: dict[str, Any]) -> None:
        """Note a driver in a Ray job that follows the run; told again after every restart."""
        self._record.attached(submission)

    def pid(self) -> int:
        """Return the process id, for drills that kill it."""
        return os.getpid()

    def request(self, what: str) -> None:
        """Ask for a ``stop`` (with a commit) or a ``checkpoint``."""
        self._post(m.UserRequest(what))  # type: ignore[arg-type]

    def heartbeat(self, node: str, figures: list[dict[str, Any]]) -> None:
        """Take the pages of a node's living workers, once a second from every agent."""
        newest = max((m.GenerationId(f["term"], f["n"]) for f in figures if f["term"]), default=None)
        steps = {f["worker"]: f["step"] for f in figures if m.GenerationId(f["term"], f["n"]) == newest}
        self._cluster.heard(node)
        self._record.figures(node, figures)
        self._post(m.Heartbeat(node, newest, steps))
        self._loop.call_soon_threadsafe(self._chaos.reached, max(steps.values(), default=0))

    def sealed(self, node: str, generation: tuple[int, int], step: int, slots: list[m.SlotInfo]) -> None:
        """Hear that all members on a node sealed a pinned snapshot."""
        self._post(m.SnapshotSealed(node, m.GenerationId(*generation), step, tuple(slots)))

    def worker_exited(self, worker: str, cause: str) -> None:
        """Hear that a worker's process is gone."""
        self._post(m.WorkerExited(worker, cause))

    def stalled(self, worker: str, generation: list[int], phase: str, waited_s: float) -> None:
        """Hear that a worker is in a phase for longer than the phase's limit."""
        self._post(m.Stalled(worker, m.GenerationId(*generation), phase, waited_s))

    # --- the loop's thread -------------------------------------------------------------------------------

    def _post(self, event: m.Event) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, event)

    def _dispatch(self, event: m.Event) -> None:
        if self._executor.ending or not self._executor.term:
            return
        now = time.monotonic()
        if isinstance(event, m.WorkerExited):
            self._cluster.gone(event.worker)
        commands = self._machine.handle(event, now)
        if commands or not isinstance(event, m.Tick | m.Heartbeat):
            log.debug("%s -> %s", event, commands)
        self._write_event(now, event, commands)
        self._record.observe(event, commands, time.time())
        if self._tracking is not None:
            self._tracking.observe(event, commands)
        for command in commands:
            if isinstance(command, m.Finish):
                self._executor.spawn(self._end(command))
            else:
                self._executor.carry_out(command)

    def _write_event(self, now: float, event: m.Event, commands: list[m.Command]) -> None:
        assert self._event_log is not None
        with self._event_log.open("a") as file:
            file.write(event_line(now, event, commands) + "\n")

    async def _begin(self) -> None:
        patience = StoragePatience(self._job, self._cluster.activity, self._record.note)
        try:
            self._executor.term = await patience.call(self._store.claim)
            found = await self._cluster.hello(self._executor.term)
            specs = [agent["spec"] for agent in found.values() if agent["spec"]]
            commits, generations = await patience.call(partial(self._store.state, not specs))
        except PicotronError as error:
            failed = isinstance(error, StorageError)
            await self._end(m.Finish("storage" if failed else "failed", str(error), m.Source("slots")))
            return
        folder = Path(self._options["event_folder"])
        folder.mkdir(parents=True, exist_ok=True)
        if self._executor.term == 1:  # another run had this name once
            for stale in folder.glob("events-*.jsonl"):
                stale.unlink()
        self._record.recall(event_log_lines(folder))
        self._event_log = folder / f"events-{self._executor.term}.jsonl"
        self._event_log.write_text(header_line(self._job, {"device": self._device}) + "\n")
        self._record.begin(self._executor.term, self._store.commit_figures)
        for line in self._options.get("notes", ()):
            self._record.note("info", "launch", line)
        for line in self._store.news:
            self._record.note("info", "init-from", line)
        for complaint in self._store.complaints:
            self._record.note("warning", "storage", complaint)
        self._tracking = Tracking(self._job, self._store, self._record, folder)
        workers = tuple(m.Member(w, node) for node, agent in found.items() for w in agent["workers"])
        self._cluster.adopt_workers(workers)
        self._dispatch(
            m.Begin(
                term=self._executor.term,
                commits=commits,
                generations=generations,
                running=max(specs, key=lambda spec: spec.id, default=None),
                workers=workers,
                busy=tuple(
                    m.BusyWorker(worker, m.GenerationId(term, n))
                    for agent in found.values()
                    for worker, term, n in agent["busy"]
                ),
                kept=tuple(slot for agent in found.values() for slot in agent.get("kept", ())),
                kept_by=max(
                    (agent["kept_by"] for agent in found.values() if agent.get("kept_by")),
                    key=lambda spec: spec.id,
                    default=None,
                ),
            )
        )
        self._executor.spawn(self._tick())
        self._executor.spawn(self._watch_nodes())
        if self._job.metrics.enabled:
            self._executor.spawn(self._serve_metrics(folder))

    async def _tick(self) -> None:
        while not self._executor.ending:
            self._dispatch(m.Tick())
            await asyncio.sleep(TICK_S)

    async def _watch_nodes(self) -> None:
        room = RoomRequest()
        while not self._executor.ending:
            for event in await self._cluster.changes(self._executor.term):
                self._dispatch(event)
            if self._job.cluster.autoscale:
                missing = self._machine.view.missing
                await asyncio.to_thread(room.update, missing, self._cluster.needs, time.monotonic())
            await asyncio.sleep(NODE_POLL_S)
        room.clear()

    async def _serve_metrics(self, event_folder: Path) -> None:
        file = targets_file(event_folder)
        service = MetricsService(
            self._job, self._record, lambda: self._machine.memory.state, get_node_ip_address(), file
        )
        await service.keep(lambda: self._cluster.metrics, lambda: not self._executor.ending)

    # --- the end -----------------------------------------------------------------------------------------

    async def _end(self, finish: m.Finish) -> None:
        """Stop everything of the run, write the summary, answer the driver's next question with it."""
        self._executor.ending = True
        for node, figures in (await self._cluster.figures()).items():
            self._record.figures(node, figures)  # the last evaluation may be younger than a heartbeat
        if finish.status != "fenced":  # else all of it belongs to the coordinator that took over
            await self._cluster.close(self._executor.term, finish.keep, finish.status == "finished")
        summary = self._record.summary(finish)
        if finish.status not in ("fenced", "storage"):
            try:
                summary = await asyncio.to_thread(self._store.finish, summary)
            except StorageError as error:
                log.warning("summary not written: %s", error)
            if self._tracking is not None:
                await self._tracking.finish()
            targets_file(Path(self._options["event_folder"])).unlink(missing_ok=True)
        self._record.done(finish, summary)
        if self._options["owns_ray"]:
            if finish.status == "finished" and finish.keep is None:
                kept_slots.discard(run_folders(self._job))  # committed, though nobody lived to note it
            local_ray.announce_end()  # its supervisor takes it down a little later
        else:
            await asyncio.sleep(LINGER_S)  # drivers that are attached read the result meanwhile
            ray.kill(ray.get_actor(coordinator_name(self._job.name), NAMESPACE))

    async def _end_with(self, process: dict[str, Any]) -> None:
        """Wait for the end of the process that the run is tied to; then stop with a commit."""
        while not await asyncio.to_thread(owner_process.is_gone, process):
            await asyncio.sleep(owner_process.POLL_S)
        self._record.note("warning", "orphaned", "the process that asked for this run is gone: stopping it")
        while not self._record.status(0)["done"]:
            self._dispatch(m.UserRequest("stop"))
            await asyncio.sleep(owner_process.POLL_S)


def event_log_lines(folder: Path) -> list[dict[str, Any]]:
    """Read all records of all terms, oldest first, without the headers."""
    files = sorted(folder.glob("events-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()[1:]]
