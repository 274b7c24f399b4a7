"""Executor of commands: each command of the machine is carried out through Ray and storage.

A command is a short method here that never blocks the loop. Its result returns as an event. Nothing here
decides anything about the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from ray.exceptions import RayError

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.operator_orders import ORDER
from picotron_ray.coordinator.out_of_memory import STRUCK
from picotron_ray.coordinator.policies.store_home import StoreSearch
from picotron_ray.runtime.coordinator.adaptation_record import judged_by
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.generation_calls import GenerationCalls
from picotron_ray.runtime.coordinator.record_keeper import RecordKeeper
from picotron_ray.runtime.coordinator.releases import Releases
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.storage_outage import StorageOutage
from picotron_ray.runtime.coordinator.supervision import Supervisor
from picotron_ray.runtime.coordinator.upload_requests import UploadRequests
from picotron_ray.runtime.coordinator.worker_orders import WorkerOrders
from picotron_ray.runtime.garbage import RareCollection
from picotron_ray.runtime.node_agent.uploads import Ended
from picotron_ray.runtime.ray_cluster.ray_calls import (
    NO_ANSWER,
    UNAVAILABLE_RETRY_S,
    error_line,
    is_dead,
    refusal,
    unmarked,
)
from picotron_ray.runtime.ray_cluster.temporary_room import start_problem
from picotron_ray.runtime.run_storage.data_record import data_problem
from picotron_ray.runtime.run_storage.run_store import RunStore

log = logging.getLogger(__name__)
MOST_TRIES = 3  # of a call that an agent fails, before it counts as a loss
CALL_ERRORS = (RayError, TimeoutError)
ASK_NEWEST_S = 30.0
"""Longest wait for the log's newest term: who asks has a worker to kill, or a run to end."""
SETTLED_S = 10.0
"""Time after a generation's start by which what was made for it may be set apart from garbage collection."""


class CommandExecutor:
    """Methods by command, on the coordinator's loop.

    ``report`` takes the events that come of commands, ``plan`` the planner's questions. ``term`` is set once
    it is claimed. ``ending`` stops all that would otherwise try again. ``supervisor`` hears of tasks that
    fail. ``keeper`` keeps the run's record in storage.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cluster: Cluster,
        store: RunStore,
        record: RunRecord,
        report: Callable[[m.Event], object],
        plan: Callable[[Sequence[m.LayoutQuestion]], None],
    ) -> None:
        self._loop = loop
        self.garbage = RareCollection()
        self._cluster = cluster
        self._store = store
        self._note = record.note
        self._report = report
        self._plan = plan
        self._uploads = UploadRequests()
        self._releases = Releases(cluster.call_agent, lambda: not self.ending)
        self._tasks: set[asyncio.Task[None]] = set()
        self.supervisor = Supervisor(record.note, self._stop)
        self.keeper = RecordKeeper(record.memo, store.save_record, record.note, self.supervisor.failed)
        self._outage = StorageOutage(record.note)
        self._orders = WorkerOrders(loop, cluster, self._told)
        self._members = GenerationCalls(cluster, report, self.spawn, lambda: not self.ending)
        self._search = StoreSearch()
        self._put_off = ""  # why the last collection of garbage failed
        self._collections = 0  # at work and waiting
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="newest-term")  # no commit is in its way
        self.term = 0
        self.ending = False

    def _stop(self) -> None:
        self.ending = True

    def carry_out(self, command: m.Command) -> None:
        """Start the work of a command."""
        self._methods[type(command)](self, command)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task on the loop.

        One that is refused by a newer term says so to the machine; any other error is told by the supervisor.
        """
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        refused = refusal(error)
        if refused is not None:
            self._report(m.Fenced(str(refused)))
        else:
            self.supervisor.failed("a task", error)

    def _start_worker(self, command: m.StartWorker) -> None:
        async def start() -> None:
            try:
                data = await self._cluster.start_worker(command.worker, command.node)
            except CALL_ERRORS as error:
                why = await self._loop.run_in_executor(None, start_problem, command.node, error)
                self._report(m.WorkerExited(command.worker, f"start_failed: {why}"))
            else:
                refused = data_problem(self._store.data, data)
                self._report(m.WorkerReady(command.worker, command.node, refused))

        self.spawn(start())

    def _kill_worker(self, command: m.KillWorker | m.StopWorker) -> None:
        self.spawn(self._cluster.kill_worker(self.term, command.worker, self.is_newest))

    async def is_newest(self) -> bool | None:
        """Whether this term is the newest that the log holds; None: storage does not answer in time."""
        asked = self._loop.run_in_executor(self._asking, self._store.is_newest)
        try:
            return await asyncio.wait_for(asked, ASK_NEWEST_S)
        except TimeoutError:
            log.warning("the newest term is not known: storage says nothing for %g s", ASK_NEWEST_S)
            return None

    def _run_generation(self, command: m.RunGeneration) -> None:
        self._search.begin(command.spec)
        self._loop.call_later(SETTLED_S, self.garbage.calm)
        if command.adopt:  # some may be on nodes that were not heard, and train there
            self._cluster.adopt_workers(command.spec.members)
            self._call_without_store(command.spec)  # they are only joined
        else:
            self.spawn(self._run_members(command.spec))

    async def _run_members(self, spec: m.GenerationSpec) -> None:
        """Start all members; without a rendezvous store only what runs already is joined."""
        store, home = await self._find_store(spec)
        if self._search.end(spec.id):  # else it was given up meanwhile
            await self._members.run(self.term, spec, store, home)

    def _call_without_store(self, spec: m.GenerationSpec) -> None:
        self._search.end(spec.id)
        self.spawn(self._members.run(self.term, spec, None, ""))

    async def _find_store(self, spec: m.GenerationSpec) -> tuple[tuple[str, int] | None, str]:
        """Return the address of a rendezvous store (None: there is none) and the node that was asked.

        After silence another one is asked, of another node where the first one's agent is silent or failed
        twice, until the machine gives the generation up. An error is tried again before its node counts as
        lost.
        """
        tries, home = 0, spec.members[0].node
        while not self.ending and self._search.goes_on(spec.id):
            home = self._cluster.store_home(spec)
            try:
                address = await self._cluster.store_address(home)
                if home == self._cluster.store_home(spec):  # else the answer told of one failure too many
                    return address, home
            except CALL_ERRORS as error:
                if (refused := refusal(error)) is not None:
                    raise refused from error
                tries += not isinstance(error, NO_ANSWER)
                if is_dead(error) or tries >= MOST_TRIES:
                    # its workers may not be taken for members that are ready: the retries would be used up
                    # at once, long before Ray notices that the node is gone
                    self._cluster.agent_died(home)
                    self._report(m.NodeLost(home, f"no rendezvous store: {error_line(error)}"))
                    break
                log.warning("rendezvous store on node %s: %s", home[:8], error_line(error))
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
        return None, home

    def _interrupt(self, command: m.Interrupt) -> None:
        if (uncalled := self._search.given_up(command)) is not None:
            self._call_without_store(uncalled)
        self._orders.give(command.worker, "interrupt", self.term, _pair(command.generation), command.mode)

    def _take_snapshot(self, command: m.TakeSnapshot) -> None:
        for worker in command.workers:
            self._orders.give(worker, "interrupt", self.term, _pair(command.generation), "snapshot")

    def _told(self, what: str, call: Coroutine[Any, Any, Any]) -> None:
        """Await a call whose effect shows elsewhere; a refusal by a newer term is told."""

        async def told() -> None:
            try:
                await call
            except CALL_ERRORS as error:
                if (refused := refusal(error)) is not None:
                    raise refused from error
                log.info("%s: %s", what, error_line(error))

        self.spawn(told())

    def _collect_inventory(self, command: m.CollectInventory) -> None:
        async def collect() -> None:
            """No answer and an error are not an empty answer: the machine asks again."""
            slots = await self._cluster.call_agent(command.node, "inventory", self.term)
            self._report(m.Inventory(command.node, command.request, slots))

        self._told(f"inventory of node {command.node[:8]}", collect())

    def _upload(self, command: m.Upload) -> None:
        self._uploads.ask(command)
        self.spawn(self._begin_upload(command))

    async def _begin_upload(self, command: m.Upload) -> None:
        """Have a node begin an upload, whose end ``uploaded`` hears; a lost reply is asked for again."""
        generation = _pair(command.generation)
        while not self.ending and self._uploads.open(command.node) is command:
            try:
                await self._cluster.call_agent(
                    command.node, "upload", self.term, generation, command.step, command.slots
                )
            except TimeoutError:
                continue  # what is under way is joined
            except RayError as error:
                if (refused := refusal(error)) is not None:
                    raise refused from error
                end = Ended(generation, command.step, command.slots, None, error_line(error))
                self.uploaded(command.node, end)
            return

    def uploaded(self, node: str, end: Ended) -> None:
        """Hear how an upload ended."""
        event = m.Uploaded(node, m.GenerationId(*end.generation), end.step, end.error, end.slots)
        self._uploads.ended(event, end.part)
        if end.full:
            self.spawn(self._collect())  # after the next commit would be too late: it has no room
        self._report(event)

    def agent_back(self, node: str) -> None:
        """Ask a restarted agent again for the upload that died with its process."""
        asked = self._uploads.open(node)
        if asked is not None:
            self._upload(replace(asked))

    def _append_generation(self, command: m.AppendGeneration) -> None:
        work = partial(self._store.append_generation, command.spec)
        self.spawn(self._appended(work, self._store.executor))

    def _append_commit(self, command: m.AppendCommit) -> None:
        chosen = self._uploads.parts(command)
        work = partial(self._store.commit, command.generation, command.step, chosen, command.unproven)
        self.spawn(self._appended(work, self._store.committer))

    async def _appended(self, work: Callable[[], m.Appended], threads: ThreadPoolExecutor) -> None:
        event = await self._loop.run_in_executor(threads, work)
        committed = event.kind == "commit" and event.seq > 0
        if committed:
            self._uploads.forget(event.generation, event.step)
        self._report(event)
        if committed:
            self.keeper.keep()
            self.spawn(self._collect())

    async def _collect(self) -> None:
        """Collect garbage, and say what was retired; of failures in a row the first is told.

        One collection may wait for the one at work, and does what all that come meanwhile would.
        """
        if self._collections > 1:
            return
        self._collections += 1
        try:
            work = self._store.collect_garbage
            put_off = await self._loop.run_in_executor(self._store.collector, work)
        finally:
            self._collections -= 1
        for why in self._store.take_given_up():
            self._note("warning", "commit", f"a commit is given up, nothing can be restored from it: {why}")
        if retired := self._store.take_retired():
            self._report(m.Retired(retired))
        if put_off and not self._put_off:
            text = f"garbage collection is put off ({put_off}); it is tried again after each commit"
            self._note("warning", "garbage", text)
        self._put_off = put_off

    def _release(self, command: m.Release) -> None:
        generation = _pair(command.generation)
        self.spawn(self._releases.tell(self.term, command))
        for worker in self._cluster.workers_on(command.node):
            self._orders.give(worker, "committed", self.term, generation, command.committed)

    def _keep_slots(self, command: m.KeepSlots) -> None:
        key = (*_pair(command.generation), command.step)

        async def keep() -> None:
            try:
                await self._cluster.call_agent(command.node, "keep", self.term, key)
            except CALL_ERRORS as error:
                if (refused := refusal(error)) is not None:
                    raise refused from error
                why = unmarked(error) or error_line(error)
                text = f"node {command.node[:8]} did not mark step {command.step} as kept: {why}"
                self._note("warning", "kept", text, {"node": command.node, "step": command.step})

        self.spawn(keep())

    def _quarantine(self, command: m.Quarantine) -> None:
        assert command.generation is not None
        self._tell_agent(command.node, "quarantine", command.slot, (*_pair(command.generation), command.step))

    def _tell_agent(self, node: str, method: str, *arguments: Any) -> None:
        call = self._cluster.call_agent(node, method, self.term, *arguments)
        self._told(f"{method} on node {node[:8]}", call)

    def _plan_layouts(self, command: m.PlanLayouts) -> None:
        self._plan(command.questions)

    def _free_node(self, command: m.FreeNode) -> None:
        self.spawn(self._cluster.free(self.term, command.node, self.is_newest))

    def _alert(self, command: m.Alert) -> None:
        if command.kind == "storage":
            self._outage.failed(command, time.monotonic())
        else:
            self._note(command.level, command.kind, command.text, command.data)
        if command.kind == "storage-wait":
            self._outage.waited(time.monotonic())
        if command.kind == "commit":
            self._outage.over(time.monotonic())
        if command.kind in (STRUCK, ORDER) or judged_by(command):
            self.keeper.keep()  # the next generation's entry may never be written, and has no orders

    _methods: ClassVar[dict[type, Callable[[CommandExecutor, Any], None]]] = {
        m.StartWorker: _start_worker,
        m.StopWorker: _kill_worker,
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
        m.PlanLayouts: _plan_layouts,
        m.FreeNode: _free_node,
        m.Alert: _alert,
    }


def _pair(generation: m.GenerationId) -> tuple[int, int]:
    return (generation.term, generation.n)
