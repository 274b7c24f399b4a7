"""The coordinator: a thin Ray shell around the pure machine of ``picotron_ray.coordinator``.

One thread owns the machine and runs an event loop; whatever arrives (calls of agents and the driver,
results of actor calls, storage, time) becomes an event there, and each command the machine answers with
is carried out by one short method below. Nothing here decides anything about the run, and nothing that
blocks runs on that thread. Every (time, event, commands) goes to a log file that replays.

After a crash Ray runs the constructor again: a new term is claimed, living agents are asked what runs,
and the machine adopts it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.config.job import ChaosFault, JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.replay import event_line, header_line
from picotron_ray.errors import CorruptError, PicotronError, StorageError
from picotron_ray.planner.choose import choose_layout
from picotron_ray.planner.profile import profile_of
from picotron_ray.runtime import local_ray
from picotron_ray.runtime.archive import Archive
from picotron_ray.runtime.cluster import Cluster
from picotron_ray.runtime.history import History
from picotron_ray.runtime.placement import living_nodes, worker_needs

log = logging.getLogger(__name__)
TICK_S = 0.25
NODE_POLL_S = 0.5
UNAVAILABLE_RETRY_S = 0.2


class Coordinator:
    """Methods are called through Ray, several at a time; they only hand over to the loop's thread."""

    def __init__(self, job: dict[str, Any], options: dict[str, Any]) -> None:
        self._job = JobConfig.model_validate(job)
        self._options = options
        self._archive = Archive(self._job, self._commit_chaos)
        self._cluster = Cluster(self._job)
        self._history = History(self._job)
        gpus = worker_needs(self._job.cluster, living_nodes()).gpus
        self._device = "cuda" if gpus else "cpu"
        choose = partial(choose_layout, self._job, profile=profile_of(self._device))
        self._machine = Machine(self._job, choose)
        self._term = 0
        self._parts: dict[tuple[m.GenerationId, int], dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._struck: set[int] = set()
        self._event_log: Path | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="coordinator", daemon=True).start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._spawn(self._begin())
        self._loop.run_forever()

    # --- called through Ray ------------------------------------------------------------------------------

    def status(self, since: int = 0) -> dict[str, Any]:
        """What the driver shows; ``since``: number of the last event it has."""
        return self._history.status(since)

    def pid(self) -> int:
        """Process id, for drills that kill it."""
        return os.getpid()

    def request(self, what: str) -> None:
        """``stop`` (with a commit) or ``checkpoint``."""
        self._post(m.UserRequest(what))  # type: ignore[arg-type]

    def heartbeat(self, node: str, figures: list[dict[str, Any]]) -> None:
        """Once a second from every agent: its living workers' pages."""
        newest = max((m.GenerationId(f["term"], f["n"]) for f in figures if f["term"]), default=None)
        steps = {f["worker"]: f["step"] for f in figures if m.GenerationId(f["term"], f["n"]) == newest}
        self._history.figures(node, figures)
        self._post(m.Heartbeat(node, newest, steps))
        self._loop.call_soon_threadsafe(self._scripted_faults, max(steps.values(), default=0))

    def sealed(self, node: str, generation: tuple[int, int], step: int, slots: list[m.SlotInfo]) -> None:
        """All members on a node sealed a pinned snapshot."""
        self._post(m.SnapshotSealed(node, m.GenerationId(*generation), step, tuple(slots)))

    def worker_exited(self, worker: str, cause: str) -> None:
        """An agent found a worker's process gone."""
        self._post(m.WorkerExited(worker, cause))

    def stalled(self, worker: str, generation: list[int], phase: str, waited_s: float) -> None:
        """An agent found a worker in a phase for longer than the phase's limit."""
        self._post(m.Stalled(worker, m.GenerationId(*generation), phase, waited_s))

    # --- the loop's thread -------------------------------------------------------------------------------

    def _post(self, event: m.Event) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, event)

    def _dispatch(self, event: m.Event) -> None:
        if self._ending or not self._term:
            return
        now = time.monotonic()
        commands = self._machine.handle(event, now)
        if commands or not isinstance(event, m.Tick | m.Heartbeat):
            log.debug("%s -> %s", event, commands)
        self._write_event(now, event, commands)
        self._history.observe(event, commands, time.time())
        for command in commands:
            self._handlers[type(command)](self, command)

    def _write_event(self, now: float, event: m.Event, commands: list[m.Command]) -> None:
        assert self._event_log is not None
        with self._event_log.open("a") as file:
            file.write(event_line(now, event, commands) + "\n")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a coordinator task failed", exc_info=task.exception())
            self._history.note("error", "internal", f"coordinator: {task.exception()!r}")

    async def _begin(self) -> None:
        try:
            self._term = await asyncio.to_thread(self._archive.claim)
            found = await self._cluster.hello(self._term)
            specs = [agent["spec"] for agent in found.values() if agent["spec"]]
            commits, generations = await asyncio.to_thread(self._archive.state, not specs)
        except PicotronError as error:
            failed = isinstance(error, StorageError)
            await self._end(m.Finish("storage" if failed else "failed", str(error)))
            return
        folder = Path(self._options["event_folder"])
        folder.mkdir(parents=True, exist_ok=True)
        if self._term == 1:  # another run had this name once
            for stale in folder.glob("events-*.jsonl"):
                stale.unlink()
        self._history.recall(event_log_lines(folder))
        self._event_log = folder / f"events-{self._term}.jsonl"
        self._event_log.write_text(header_line(self._job, {"device": self._device}) + "\n")
        self._history.begin(self._term, self._archive)
        for complaint in self._archive.complaints:
            self._history.note("warning", "storage", complaint)
        workers = tuple(m.Member(w, node) for node, agent in found.items() for w in agent["workers"])
        self._cluster.adopt_workers(workers)
        self._dispatch(
            m.Begin(
                term=self._term,
                commits=commits,
                generations=generations,
                running=max(specs, key=lambda spec: spec.id, default=None),
                workers=workers,
                busy=tuple(
                    m.Busy(worker, m.GenerationId(term, n))
                    for agent in found.values()
                    for worker, term, n in agent["busy"]
                ),
            )
        )
        self._spawn(self._tick())
        self._spawn(self._watch_nodes())

    async def _tick(self) -> None:
        while not self._ending:
            self._dispatch(m.Tick())
            await asyncio.sleep(TICK_S)

    async def _watch_nodes(self) -> None:
        while not self._ending:
            for event in await self._cluster.changes(self._term):
                self._dispatch(event)
            await asyncio.sleep(NODE_POLL_S)

    # --- commands ----------------------------------------------------------------------------------------

    def _start_worker(self, command: m.StartWorker) -> None:
        async def start() -> None:
            try:
                await self._cluster.start_worker(command.worker, command.node)
            except RayError as error:
                self._dispatch(m.WorkerExited(command.worker, f"start_failed: {_line(error)}"))
            else:
                self._dispatch(m.WorkerReady(command.worker, command.node))

        self._spawn(start())

    def _stop_worker(self, command: m.StopWorker) -> None:
        self._spawn(self._cluster.kill_worker(self._term, command.worker))

    def _kill_worker(self, command: m.KillWorker) -> None:
        self._spawn(self._cluster.kill_worker(self._term, command.worker))

    def _run_generation(self, command: m.RunGeneration) -> None:
        spec = command.spec

        async def run() -> None:
            try:
                store = await self._cluster.store_address(spec)
            except RayError as error:
                log.warning("no rendezvous store: %s", error)
                for member in spec.members:
                    self._dispatch(m.Outcome(member.worker, spec.id, "peer_lost", -1, "no store"))
                return
            for member in spec.members:
                self._spawn(self._run_member(spec, member, store))

        self._spawn(run())

    async def _run_member(self, spec: m.GenerationSpec, member: m.Member, store: tuple[str, int]) -> None:
        """One member's whole generation; a lost reply is asked for again, because a second call joins."""
        while not self._ending:
            try:
                answer = await self._cluster.call_worker(
                    member.worker, "run_generation", self._term, spec, store
                )
            except ActorUnavailableError:
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
            except RayActorError:
                self._dispatch(m.WorkerExited(member.worker, "process died"))
                return
            except RayError as error:
                self._dispatch(m.Outcome(member.worker, spec.id, "failed", -1, f"error: {_line(error)}"))
                return
            else:
                self._dispatch(answer)
                return

    def _interrupt(self, command: m.Interrupt) -> None:
        self._tell(command.worker, "interrupt", self._term, _pair(command.generation), command.mode)

    def _take_snapshot(self, command: m.TakeSnapshot) -> None:
        for worker in command.workers:
            self._tell(worker, "interrupt", self._term, _pair(command.generation), "snapshot")

    def _tell(self, worker: str, method: str, *arguments: Any) -> None:
        """A call whose answer does not matter: what it causes comes back as an event."""

        async def call() -> None:
            try:
                await self._cluster.call_worker(worker, method, *arguments)
            except RayError as error:
                log.debug("%s of %s: %s", method, worker, _line(error))

        self._spawn(call())

    def _collect_inventory(self, command: m.CollectInventory) -> None:
        async def collect() -> None:
            try:
                slots = await self._cluster.call_agent(command.node, "inventory", self._term)
            except ActorUnavailableError:
                return  # it may be there: no answer is not an empty one, and the machine asks again
            except RayError as error:
                log.warning("no inventory from node %s: %s", command.node[:8], _line(error))
                slots = ()
            self._dispatch(m.Inventory(command.node, command.request, slots))

        self._spawn(collect())

    def _upload(self, command: m.Upload) -> None:
        async def upload() -> None:
            error = ""
            try:
                part = await self._cluster.call_agent(
                    command.node, "upload", self._term, _pair(command.generation), command.step, command.slots
                )
                self._parts.setdefault((command.generation, command.step), {})[command.node] = part
            except RayError as failure:
                cause = getattr(failure, "cause", None)
                error = f"corrupt:{cause.where}" if isinstance(cause, CorruptError) else _line(failure)
            self._dispatch(m.Uploaded(command.node, command.generation, command.step, error))

        self._spawn(upload())

    def _append_generation(self, command: m.AppendGeneration) -> None:
        self._spawn(self._appended(partial(self._archive.append_generation, command.spec)))

    def _append_commit(self, command: m.AppendCommit) -> None:
        parts = self._parts.get((command.generation, command.step), {})
        chosen = [parts[node] for node in command.nodes if node in parts]
        self._spawn(self._appended(partial(self._archive.commit, command.generation, command.step, chosen)))

    async def _appended(self, work: Callable[[], m.Appended]) -> None:
        event = await self._loop.run_in_executor(self._archive.executor, work)
        if event.kind == "commit" and event.seq:
            self._parts = {key: value for key, value in self._parts.items() if key[1] > event.step}
            self._spawn(self._collect_garbage())
        self._dispatch(event)

    async def _collect_garbage(self) -> None:
        await self._loop.run_in_executor(self._archive.executor, self._archive.collect_garbage)

    def _release(self, command: m.Release) -> None:
        generation = _pair(command.generation)

        async def release() -> None:
            try:
                await self._cluster.call_agent(command.node, "release", self._term, generation, command.step)
            except RayError as error:
                log.debug("release on node %s: %s", command.node[:8], _line(error))

        self._spawn(release())
        for worker in self._cluster.workers_on(command.node):
            self._tell(worker, "committed", self._term, generation, command.committed)

    def _quarantine(self, command: m.Quarantine) -> None:
        self._spawn(self._quarantined(command))

    async def _quarantined(self, command: m.Quarantine) -> None:
        try:
            await self._cluster.call_agent(command.node, "quarantine", self._term, command.slot)
        except RayError as error:
            log.debug("quarantine on node %s: %s", command.node[:8], _line(error))

    def _alert(self, command: m.Alert) -> None:
        self._history.note(command.level, command.kind, command.text, command.data)

    def _finish(self, command: m.Finish) -> None:
        self._spawn(self._end(command))

    _handlers: ClassVar[dict[type, Callable[[Coordinator, Any], None]]] = {
        m.StartWorker: _start_worker,
        m.StopWorker: _stop_worker,
        m.KillWorker: _kill_worker,
        m.RunGeneration: _run_generation,
        m.Interrupt: _interrupt,
        m.CollectInventory: _collect_inventory,
        m.Upload: _upload,
        m.AppendGeneration: _append_generation,
        m.AppendCommit: _append_commit,
        m.Release: _release,
        m.TakeSnapshot: _take_snapshot,
        m.Quarantine: _quarantine,
        m.Alert: _alert,
        m.Finish: _finish,
    }

    # --- the end -----------------------------------------------------------------------------------------

    async def _end(self, finish: m.Finish) -> None:
        """Stop everything of the run, write the summary, answer the driver's next question with it."""
        self._ending = True
        for node, figures in (await self._cluster.figures()).items():
            self._history.figures(node, figures)  # the last evaluation may be younger than a heartbeat
        if finish.status != "fenced":  # else all of it belongs to the coordinator that took over
            await self._cluster.close(self._term)
        summary = self._history.summary(finish)
        if finish.status not in ("fenced", "storage"):
            try:
                summary = await asyncio.to_thread(self._archive.finish, summary)
            except StorageError as error:
                log.warning("summary not written: %s", error)
        self._history.done(finish, summary)
        if self._options["owns_ray"]:
            local_ray.announce_end()  # its supervisor takes it down a little later

    # --- scripted faults ---------------------------------------------------------------------------------

    def _scripted_faults(self, step: int) -> None:
        for index, fault in enumerate(self._job.chaos):
            if step < fault.step or fault.target.startswith("worker:") or fault.phase == "commit":
                continue
            if index not in self._struck:
                self._struck.add(index)
                self._spawn(self._strike(index, fault))

    async def _strike(self, index: int, fault: ChaosFault) -> None:
        if not await asyncio.to_thread(self._archive.claim_fault, index):
            return
        if fault.target == "coordinator":
            os.kill(os.getpid(), signal.SIGKILL)
        await self._cluster.remove_node(int(fault.target.removeprefix("node:")))

    def _commit_chaos(self, step: int) -> None:
        """Between a commit's manifest and its log entry."""
        for index, fault in enumerate(self._job.chaos):
            due = fault.target == "coordinator" and fault.phase == "commit" and step >= fault.step
            if due and self._archive.claim_fault(index):
                os.kill(os.getpid(), signal.SIGKILL)


def _pair(generation: m.GenerationId) -> tuple[int, int]:
    return (generation.term, generation.n)


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[-1][:300] if text else type(error).__name__


def event_log_lines(folder: Path) -> list[dict[str, Any]]:
    """All records of all terms, oldest first, without the headers."""
    files = sorted(folder.glob("events-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()[1:]]
