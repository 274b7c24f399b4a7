"""Executor of commands: each command of the machine is carried out through Ray and storage.

A command is a short method here that never blocks the loop. Its result returns as an event. Nothing here
decides anything about the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.coordinator import messages as m
from picotron_ray.errors import CorruptError
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.run_storage.run_store import RunStore

log = logging.getLogger(__name__)
UNAVAILABLE_RETRY_S = 0.2


class CommandExecutor:
    """Methods by command, on the coordinator's loop.

    ``report`` takes the events that come of commands. ``term`` is set once it is claimed. ``ending`` stops
    all that would otherwise try again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cluster: Cluster,
        store: RunStore,
        record: RunRecord,
        report: Callable[[m.Event], None],
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._store = store
        self._record = record
        self._report = report
        self._parts: dict[tuple[m.GenerationId, int], dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.term = 0
        self.ending = False

    def carry_out(self, command: m.Command) -> None:
        """Start the work of a command."""
        self._methods[type(command)](self, command)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task on the loop; one that fails is noted among the run's events."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a coordinator task failed", exc_info=task.exception())
            self._record.note("error", "internal", f"coordinator: {task.exception()!r}")

    def _start_worker(self, command: m.StartWorker) -> None:
        async def start() -> None:
            try:
                await self._cluster.start_worker(command.worker, command.node)
            except RayError as error:
                self._report(m.WorkerExited(command.worker, f"start_failed: {_line(error)}"))
            else:
                self._report(m.WorkerReady(command.worker, command.node))

        self.spawn(start())

    def _stop_worker(self, command: m.StopWorker) -> None:
        self.spawn(self._cluster.kill_worker(self.term, command.worker))

    def _kill_worker(self, command: m.KillWorker) -> None:
        self.spawn(self._cluster.kill_worker(self.term, command.worker))

    def _run_generation(self, command: m.RunGeneration) -> None:
        self.spawn(self._run_members(command.spec))

    async def _run_members(self, spec: m.GenerationSpec) -> None:
        """Start all members; without a rendezvous store only what runs already is joined."""
        home, store = spec.members[0].node, None
        while store is None and not self.ending:
            try:
                store = await self._cluster.store_address(spec)
            except ActorUnavailableError:
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
            except RayError as error:
                # its workers may not be taken for members that are ready: the retries would be used up
                # at once, long before Ray notices that the node is gone
                self._cluster.agent_died(home)
                self._report(m.NodeLost(home, f"no rendezvous store: {_line(error)}"))
                break
        for member in spec.members:
            if store is not None or member.node != home:
                self.spawn(self._run_member(spec, member, store))

    async def _run_member(
        self, spec: m.GenerationSpec, member: m.Member, store: tuple[str, int] | None
    ) -> None:
        """Run one member's whole generation; a lost reply is asked for again, because a second call joins."""
        while not self.ending:
            try:
                answer = await self._cluster.call_worker(
                    member.worker, "run_generation", self.term, spec, store
                )
            except ActorUnavailableError:
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
            except RayActorError:
                self._report(m.WorkerExited(member.worker, "process died"))
                return
            except RayError as error:
                self._report(
                    m.Outcome(member.worker, spec.id, FailureKind.FAILED, -1, f"error: {_line(error)}")
                )
                return
            else:
                self._report(answer)
                return

    def _interrupt(self, command: m.Interrupt) -> None:
        self._tell(command.worker, "interrupt", self.term, _pair(command.generation), command.mode)

    def _take_snapshot(self, command: m.TakeSnapshot) -> None:
        for worker in command.workers:
            self._tell(worker, "interrupt", self.term, _pair(command.generation), "snapshot")

    def _tell(self, worker: str, method: str, *arguments: Any) -> None:
        """Call a worker without waiting for its answer: the effect comes back as an event."""

        async def call() -> None:
            try:
                await self._cluster.call_worker(worker, method, *arguments)
            except RayError as error:
                log.debug("%s of %s: %s", method, worker, _line(error))

        self.spawn(call())

    def _collect_inventory(self, command: m.CollectInventory) -> None:
        async def collect() -> None:
            try:
                slots = await self._cluster.call_agent(command.node, "inventory", self.term)
            except ActorUnavailableError:
                return  # it may be there: no answer is not an empty one, and the machine asks again
            except RayError as error:
                log.warning("no inventory from node %s: %s", command.node[:8], _line(error))
                slots = ()
            self._report(m.Inventory(command.node, command.request, slots))

        self.spawn(collect())

    def _upload(self, command: m.Upload) -> None:
        async def upload() -> None:
            error = ""
            try:
                part = await self._cluster.call_agent(
                    command.node, "upload", self.term, _pair(command.generation), command.step, command.slots
                )
                self._parts.setdefault((command.generation, command.step), {})[command.node] = part
            except RayError as failure:
                cause = getattr(failure, "cause", None)
                error = f"corrupt:{cause.where}" if isinstance(cause, CorruptError) else _line(failure)
            self._report(m.Uploaded(command.node, command.generation, command.step, error))

        self.spawn(upload())

    def _append_generation(self, command: m.AppendGeneration) -> None:
        self.spawn(self._appended(partial(self._store.append_generation, command.spec)))

    def _append_commit(self, command: m.AppendCommit) -> None:
        parts = self._parts.get((command.generation, command.step), {})
        chosen = [parts[node] for node in command.nodes if node in parts]
        self.spawn(self._appended(partial(self._store.commit, command.generation, command.step, chosen)))

    async def _appended(self, work: Callable[[], m.Appended]) -> None:
        event = await self._loop.run_in_executor(self._store.executor, work)
        if event.kind == "commit" and event.seq:
            self._parts = {key: value for key, value in self._parts.items() if key[1] > event.step}
            self.spawn(self._collect_garbage())
        self._report(event)

    async def _collect_garbage(self) -> None:
        await self._loop.run_in_executor(self._store.executor, self._store.collect_garbage)

    def _release(self, command: m.Release) -> None:
        generation = _pair(command.generation)

        async def release() -> None:
            try:
                await self._cluster.call_agent(command.node, "release", self.term, generation, command.step)
            except RayError as error:
                log.debug("release on node %s: %s", command.node[:8], _line(error))

        self.spawn(release())
        for worker in self._cluster.workers_on(command.node):
            self._tell(worker, "committed", self.term, generation, command.committed)

    def _keep_slots(self, command: m.KeepSlots) -> None:
        async def mark() -> None:
            key = (*_pair(command.generation), command.step)
            try:
                await self._cluster.call_agent(command.node, "keep", self.term, key)
            except RayError as error:
                log.warning("slots on node %s are not marked: %s", command.node[:8], _line(error))

        self.spawn(mark())

    def _quarantine(self, command: m.Quarantine) -> None:
        self.spawn(self._quarantined(command))

    async def _quarantined(self, command: m.Quarantine) -> None:
        try:
            await self._cluster.call_agent(command.node, "quarantine", self.term, command.slot)
        except RayError as error:
            log.debug("quarantine on node %s: %s", command.node[:8], _line(error))

    def _alert(self, command: m.Alert) -> None:
        self._record.note(command.level, command.kind, command.text, command.data)

    _methods: ClassVar[dict[type, Callable[[CommandExecutor, Any], None]]] = {
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
        m.KeepSlots: _keep_slots,
        m.TakeSnapshot: _take_snapshot,
        m.Quarantine: _quarantine,
        m.Alert: _alert,
    }


def _pair(generation: m.GenerationId) -> tuple[int, int]:
    return (generation.term, generation.n)


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[-1][:300] if text else type(error).__name__
