"""Node agent: one torch-free Ray actor per node that outlives the workers.

It watches its workers' heartbeat pages twelve times a second, reports to the coordinator, kills by pid
(immediate, where ``ray.kill`` takes seconds), keeps the snapshot slots of living and dead workers,
uploads them to storage, hands boxes of them to members on other nodes, serves the node's metrics, and
starts the standing rendezvous store. It decides nothing about the run: what it sees becomes an event of
the coordinator, what it is told is done at once and may be told twice.

Its process may die: Ray starts it again on the same node, and the constructor finds workers, pages, slots
and store where they were. Nothing that the run needs lives in its memory alone; the newest term, which
fences older coordinators off, is in the node's folder.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from picotron_ray.checkpoint.shard_service.channel import Endpoint
from picotron_ray.checkpoint.shard_service.server import ShardServer
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, SlotInfo
from picotron_ray.errors import UnmarkedError
from picotron_ray.observability.nvml import Gpus
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.beats import Beats, Figures
from picotron_ray.runtime.node_agent.burial import Burials
from picotron_ray.runtime.node_agent.calls import call_agent, call_coordinator
from picotron_ray.runtime.node_agent.folder_guard import PUT_OFF, FolderGuard
from picotron_ray.runtime.node_agent.kept_state import KeptState
from picotron_ray.runtime.node_agent.log_service import AgentLogs
from picotron_ray.runtime.node_agent.machine import machine_of
from picotron_ray.runtime.node_agent.machine_watch import watched
from picotron_ray.runtime.node_agent.member_calls import MemberCalls
from picotron_ray.runtime.node_agent.metrics import AgentFigures, serve_metrics
from picotron_ray.runtime.node_agent.oom_watch import OomWatch
from picotron_ray.runtime.node_agent.pages import is_alive, kill_worker, read_pages
from picotron_ray.runtime.node_agent.rendezvous import RendezvousServer
from picotron_ray.runtime.node_agent.reports import AWAY, Reports
from picotron_ray.runtime.node_agent.seal_watch import SealWatch, slot_info
from picotron_ray.runtime.node_agent.slot_release import release_slots, still_read
from picotron_ray.runtime.node_agent.specs import ToldSpecs, newest_spec
from picotron_ray.runtime.node_agent.stall_watch import StallWatch
from picotron_ray.runtime.node_agent.term_file import TermFile
from picotron_ray.runtime.node_agent.tool_calls import ToolCalls
from picotron_ray.runtime.node_agent.uploads import Uploads
from picotron_ray.runtime.ray_cluster import cleanup, kept_slots
from picotron_ray.runtime.ray_cluster.data_notes import read_notes
from picotron_ray.runtime.ray_cluster.fingerprint import node_versions
from picotron_ray.runtime.ray_cluster.interfaces import listen_address_or_problem
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, ledger_folder, node_folder, worker_actor_name
from picotron_ray.runtime.ray_cluster.node_facts import look
from picotron_ray.runtime.run_storage.shared_folder import unseen_problem
from picotron_ray.runtime.worker.member_call import MemberEnd

log = logging.getLogger(__name__)
WATCH_S = 0.08


class Agent(AgentLogs, ToolCalls):
    """Ray actor. Several methods run at a time."""

    def __init__(self, job: dict[str, Any], node: str, host: str) -> None:
        self._job = JobConfig.model_validate(job)
        self._node = node
        self._host, self._problem = listen_address_or_problem(self._job, host)  # told at hello
        self._sees = ""  # identity of the run whose storage this node was found to see
        self._folder = node_folder(self._job.snapshot.folder, self._job.name, node)
        actor = ray.get_runtime_context().get_actor_id() or ""
        claim = partial(cleanup.claim, self._folder, kept_slots.marker_bytes(self._job.cluster.max_workers))
        claim()
        self._guard = FolderGuard(self._folder, claim)
        super().__init__(self._job, node, self._pages)
        self._info = partial(slot_info, node)
        self._terms = TermFile(self._folder, actor)
        self._kept = KeptState(self._folder, self._info)
        self._back = self._terms.found  # after a death; the coordinator has not heard of it yet
        self._gpus = Gpus()
        self._handles: dict[str, Any] = {}  # by worker, those that were called
        self._members = MemberCalls(self._worker)
        self._gone: set[str] = set()  # workers whose end has been reported
        self._reports = Reports(self._tell)
        self._oom_watch = OomWatch()
        self._stalls = StallWatch(self._folder, self._node, self._reports, self._tell)
        self._seal_watch = SealWatch(self._reports, node, self._folder, self._info)
        self._quarantined: dict[str, SlotKey] = {}  # file: the state that was found bad in it
        self._uploads = Uploads(self._job, node, self._folder)
        self._rendezvous = RendezvousServer(self._folder, self._host, actor, os.getppid())
        self._shards = ShardServer(
            self._folder,
            self._host,
            self._job.snapshot.fetch_timeout_s,
            self._job.snapshot.serve_bytes_per_s,
            lambda name, key: self._quarantined.get(name) == key,
            ledger_folder(self._folder),
        )
        machine = machine_of(self._job, self._folder, self._gpus)
        figures = AgentFigures(self._folder, self._living, self._shards, machine, self._logs.store)
        self._metrics = serve_metrics(self._job, node, self._host, figures)
        to_agent = partial(call_agent, self._job.name)
        self._beats = Beats(node, self._job.elastic.heartbeat_s, self._tell, to_agent)
        self._telemetry = watched(self._folder, self._job.telemetry.interval_s, machine)
        self._newest_spec, self._specs = partial(newest_spec, self._folder), ToldSpecs()
        self._burials = Burials(self._folder, self._unburied, self._newest_spec)
        self._closing = threading.Event()
        self._watcher = self._begin_watch()

    def hello(self, term: int, run: str = "") -> dict[str, Any]:
        """Return what the node is and what runs on it, specs by name; a newer term fences older ones off.

        Args:
            run: identity of the run (`RunLog.identity`), which slots are kept with.
        """
        self._accept(term)
        self._terms.learn(run)
        self._logs.learn(run)
        self._rendezvous.start()  # now, so that it listens by the time the workers have imported torch
        self._stalls.forget()  # what an earlier coordinator was told, this one has not heard
        self._seal_watch.forget()
        kept, living = self._kept.told(self._terms.run), self._living()
        return {
            "node": self._node,
            "pid": os.getpid(),
            "problem": self._problem or self._unseen_storage(run),
            "versions": node_versions(self._job),
            "workers": [page.worker for page in living],
            "data": read_notes(self._folder, [page.worker for page in living]),
            "busy": [(page.worker, page.term, page.n) for page in living if page.phase != "idle"],
            "step_s": max((page.step_time_s for page in living if page.phase != "idle"), default=0.0),
            "spec": self._specs.name(self._newest_spec()),
            **kept,
            "kept_by": self._specs.name(kept["kept_by"]),
            "metrics": self._metrics,
            "facts": look(self._job.snapshot.folder, self._job.name, gpus=self._gpus),
        }

    def _unseen_storage(self, run: str) -> str:
        """Look for the run's folder until it was seen once; what fails later is an outage."""
        if not run or self._sees == run:
            return ""
        why = unseen_problem(self._job.storage, self._job.name, run, os.uname().nodename)
        self._sees = self._sees if why else run
        return why

    def spec(self, term: int, digest: str) -> GenerationSpec | None:
        """Return the spec that ``hello`` named so; None where this process has not."""
        self._accept(term)
        return self._specs.get(digest)

    def newest_term(self, term: int = 0) -> int:
        """Return the newest term heard of, ``term`` included (0: the caller has none); as a ping."""
        return self._accept(term) if term else self._terms.newest(0)

    def store_address(self) -> tuple[str, int, int]:
        """Return host and port of the rendezvous store once it listens, and how many were replaced."""
        return (*self._rendezvous.address(), self._rendezvous.replaced)

    def figures(self) -> list[dict[str, Any]]:
        """Return the pages of the living workers, as heartbeats carry them."""
        return [page.figures() for page in self._living()]

    def inventory(self, term: int) -> tuple[SlotInfo, ...]:
        """Return all sealed slots of this node, but those found bad; SlotError while some are saved.

        Headers alone are read, as recovery waits for the answer: who loads a slot checks what it loads.
        """
        self._accept(term)
        self._guard.check_saved()
        return tuple(
            self._info(path, header)
            for path, header in list_slots(self._folder)
            if self._quarantined.get(path.name) != header.key
        )

    def shard_service(self) -> Endpoint:
        """Return where members on other nodes read the slots of this one, and the token that they need."""
        return self._shards.endpoint

    def quarantine(self, term: int, name: str, key: SlotKey) -> None:
        """Never offer state ``key`` in this file again; one that is written over it is another slot."""
        self._accept(term)
        self._quarantined[name] = key

    def upload(self, term: int, generation: tuple[int, int], step: int, slots: tuple[str, ...]) -> None:
        """Begin to put the chunks of pinned slots into storage; its end is reported by ``uploaded``.

        Asked again for what is under way, it joins that.
        """
        self._accept(term)
        self._uploads.begin(generation, step, slots)

    def release(
        self,
        term: int,
        generation: tuple[int, int],
        step: int,
        keep: Sequence[SlotKey] = (),
        committed: int = 0,
    ) -> None:
        """Unpin the slots up to a state, and delete what nothing needs any more (`release_slots`).

        Those that the newest generation came from stay until a state of its own is released: it may have to
        be started again from them.

        Args:
            keep: older states that are still to be committed: nothing of them changes.
            committed: step of the newest commit; the state itself may be void.
        """
        self._accept(term)
        needed = still_read(self._newest_spec(), GenerationId(*generation))
        self._uploads.settle((*generation, step), keep)
        release_slots(
            self._folder,
            (*generation, step),
            self._kept.told(self._terms.run)["kept"],
            living={page.worker for page in self._living()},
            needed=needed,
            keep=keep,
            committed=committed,
        )

    def keep(self, term: int, key: tuple[int, int, int]) -> None:
        """Mark the slots of state (term, n, step): the next launch finds them, whatever ends this one."""
        self._accept(term)
        self._kept.mark(key, self._terms.run)

    def kill(self, term: int, worker: str) -> bool | str:
        """Kill a worker by SIGKILL to its pid; True where it was alive, `PUT_OFF` where it is rescued."""
        self._accept(term)
        if worker in self._guard.rescued:
            return PUT_OFF
        page = next((page for page in self._pages() if page.worker == worker), None)
        if page is not None and page.phase != "idle" and is_alive(page):
            self._stalls.before_kill(page)
        return kill_worker(page)

    def order(self, term: int, workers: list[str], method: str, arguments: list[Any]) -> None:
        """Pass an order on to workers of this node, which needs no answer: one call brings it for all."""
        self._accept(term)
        for worker in workers:
            with suppress(ValueError):  # it has ended
                getattr(self._worker(worker), method).remote(term, *arguments)

    def run_generation(
        self,
        term: int,
        generation: tuple[int, int],
        spec: list[Any],
        store: tuple[str, int] | None,
        workers: list[str],
    ) -> list[MemberEnd]:
        """Run members of a generation on this node, or join them; returns the first that end.

        Args:
            spec: a list of the generation's spec, or of Ray's reference to it, which each worker follows.
        """
        self._accept(term)
        return self._members.run((term, GenerationId(*generation)), spec[0], store, workers)

    def _worker(self, worker: str) -> Any:
        """Handle of a worker; ValueError where it has ended. Names are never used again."""
        handle = self._handles.get(worker)
        if handle is None:
            name = worker_actor_name(self._job.name, worker)
            handle = self._handles[worker] = ray.get_actor(name, NAMESPACE)
        return handle

    def evidence(self, term: int, generation: tuple[int, int], most_bytes: int) -> list[dict[str, Any]]:
        """Ask the members of a generation on this node where they are; an entry for each."""
        self._accept(term)
        members = [p for p in self._living() if (p.term, p.n) == tuple(generation) and p.phase != "idle"]
        return self._stalls.testimony(members, most_bytes)

    def die(self) -> None:
        """Take the whole node away, as if unplugged: workers, slots, Ray's raylet, this agent."""
        self._closing.set()
        for page in self._pages():
            kill_worker(page)
        cleanup.release(self._folder)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self, term: int | None, keep: tuple[int, ...] | None = None) -> None:
        """End the run on this node: kill what is left, remove the node's folder.

        Args:
            term: of the coordinator that ends the run; None: a person does, whom no term fences off.
            keep: (term, n, step) of a state whose slots stay for the next launch, empty: all that are sealed;
                None: none stays.

        Raises:
            FencedError: a newer coordinator goes on with the run.
            UnmarkedError: what is to stay cannot be marked: this process goes on, and guards it.
        """
        if term is not None:
            self._accept(term)
        self._closing.set()
        self._watcher.join(timeout=2)
        self._burials.settle(timeout_s=2)
        for page in self._pages():
            kill_worker(page)
        foreign = term is not None and "foreign" in self._kept.told(self._terms.run)
        try:
            keeps = foreign or (keep is not None and self._kept.mark(keep, self._terms.run, last=True))
        except UnmarkedError:
            self._closing.clear()
            self._watcher = self._begin_watch()
            raise
        for part in (self._guard, self._burials, self._uploads, self._shards, self._members, self._logs):
            part.close()
        self._rendezvous.stop()
        if keeps:
            kept_slots.strip(self._folder)
        else:
            cleanup.release(self._folder)

    # --- watching --------------------------------------------------------------------------------------

    def _accept(self, term: int) -> int:
        return self._terms.accept(term)

    def _pages(self) -> list[PageView]:
        return [*read_pages(self._folder), *self._guard.robbed()]

    def _living(self) -> list[PageView]:
        return list(filter(is_alive, self._pages()))

    def _begin_watch(self) -> threading.Thread:
        watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        watcher.start()
        return watcher

    def _unburied(self) -> list[PageView]:
        return [page for page in self._pages() if page.worker not in self._gone]

    def _watch(self) -> None:
        beat, errors = 0.0, 0
        while not self._closing.wait(WATCH_S):
            now = time.monotonic()
            if due := now >= beat:
                beat = now + self._job.elastic.heartbeat_s
            try:
                self._look(now, heartbeat=due)
            except AWAY as error:  # workers carry on; the next look tries again
                log.debug("coordinator away: %s", error)
            except Exception:  # a full disk, a torn page: nothing ends the watch
                errors += 1
                if errors & (errors - 1) == 0:
                    log.exception("the watch failed, %d times by now", errors)

    def _look(self, now: float, heartbeat: bool) -> None:
        if self._back:
            self._reports.tell(now, "restarted", "agent_restarted", self._node, self._metrics)
            self._back = False
        pages = read_pages(self._folder)
        whole = not self._guard.look(pages, now)
        self._oom_watch.look()
        living = []
        for page in pages:
            if is_alive(page):
                living.append(page)
            elif page.worker not in self._gone:
                cause = self._oom_watch.cause()
                self._reports.tell(now, page.worker, "worker_exited", page.worker, cause)
                self._gone.add(page.worker)
                self._handles.pop(page.worker, None)
        if heartbeat:  # first: no error of what follows may silence the node
            self._beats.send(self._telemetry.added(self._guard.figures(living), now), now)
        self._stalls.report([*living, *self._guard.forsaken()], now)
        self._seal_watch.look(living, now)
        for end in self._uploads.ended():
            self._reports.tell(now, ("uploaded", *end.key), "uploaded", self._node, end)
        if (rescue := self._guard.done()) is not None:
            self._terms.save()
            self._reports.tell(now, "guard", "agent_restarted", self._node, self._metrics, rescue.text)
            for worker in rescue.ended:
                self._reports.tell(now, worker, "worker_exited", worker, "its files were deleted")
        self._reports.look(now)
        if heartbeat and whole:
            self._rendezvous.keep(now)
            self._burials.begin()

    def carry(self, node: str, figures: Figures) -> bool:
        """Take another node's heartbeat along; False where it had better call the coordinator itself."""
        return self._beats.carry(node, figures)

    def _tell(self, method: str, *arguments: Any) -> Future[Any]:
        return call_coordinator(self._job.name, method, *arguments)
