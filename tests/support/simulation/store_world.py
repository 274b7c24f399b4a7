"""Simulation with the real code of storage: log, uploads, intents, commits, retention and garbage collection.

Coordinators have a real ``RunStore`` each, which works on a process of its own; nodes upload real slot files
by ``upload_slots``, renew real intents, and know the newest term by a real ``TermFile``. What is below is
simulated: objects in memory, time, outages. ``StoreChecks`` judges what becomes of the objects.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from picotron_ray.checkpoint.store import condemned, deletion, gc, upload
from picotron_ray.checkpoint.store.intents import Intents
from picotron_ray.checkpoint.store.manifest import committed_manifest
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.plan_book import Choose
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S
from picotron_ray.coordinator.simulator.nodes import SimNode
from picotron_ray.coordinator.simulator.protocols import Observer
from picotron_ray.coordinator.simulator.run import Report, simulate
from picotron_ray.coordinator.simulator.shell import Shell
from picotron_ray.coordinator.simulator.world import RETRY_S, Sim
from picotron_ray.errors import CorruptError, PicotronError, StorageError, StorageUnavailableError
from picotron_ray.runtime.coordinator.upload_requests import UploadRequests
from picotron_ray.runtime.node_agent.term_file import TermFile
from picotron_ray.runtime.node_agent.uploads import _told
from picotron_ray.runtime.run_storage import assembly_process, run_store
from picotron_ray.runtime.run_storage.life_sign import LifeSign
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.support.simulation.objects import Client, Objects
from tests.support.simulation.processes import Process, Processes, VirtualEvent
from tests.support.simulation.states import write_slot
from tests.support.simulation.store_checks import StoreChecks, StoreMirror

BAD_STEP = 41
PATIENCE_S = 60.0
USURPED = 0.03  # share of the deletions amid which a coordinator is replaced


class SimIntents(Intents):
    """Intents whose thread is a process of the simulation, as long as its node lives."""

    def __init__(self, storage: Client, processes: Processes, alive: Callable[[], bool]) -> None:
        super().__init__(storage)
        self._processes, self._alive = processes, alive
        self._wake: Any = VirtualEvent(processes)

    def _spawn(self) -> Any:
        process = Process(self._processes, self._alive)
        process.do(self._renew, _expect_no_error)
        return process


def _expect_no_error(result: Any, error: Exception | None) -> None:
    if error is not None:
        raise error


class NoSign(LifeSign):
    """Life without signs: they are put by a thread of their own, in which virtual time knows no process."""

    def begin(self, term: int) -> None:
        pass


class StoreOfRun(RunStore):
    """The coordinator's side of storage; what a ledger's digests say needs data, and is another test's."""

    processes: Processes
    log_process: Process

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self._life = NoSign(self._storage)

    def _in_order(self, work: Callable[[], Any]) -> Any:
        over, ended = VirtualEvent(self.processes), list[tuple[Any, Exception | None]]()

        def done(result: Any, error: Exception | None) -> None:
            ended.append((result, error))
            over.set()

        self.log_process.do(work, done)
        while not over.wait(PATIENCE_S):
            pass
        result, error = ended[0]
        _expect_no_error(result, error)
        return result

    def _ledger_figures(self) -> dict[str, Any]:
        return {}


class StoreNode(SimNode):
    """Node that uploads for real, and knows the newest term by its file."""

    sim: StoreSim  # type: ignore[assignment]

    def __init__(self, sim: StoreSim, name: str, capacity: int) -> None:
        super().__init__(sim, name, capacity)
        self._folder = sim.folder / name
        self._folder.mkdir()
        self._terms = TermFile(self._folder, "actor")
        self._asked: set[m.Upload] = set()
        client = Client(sim.objects, sim.processes, None)
        self.intents = SimIntents(client, sim.processes, self._lives)

    def _lives(self) -> bool:
        return self.sim.nodes.get(self.name) is self

    def accepts(self, term: int) -> bool:
        self.term = self._terms.newest(term)
        return term >= self.term

    def restart(self) -> None:
        super().restart()
        self._terms = TermFile(self._folder, "actor")

    def release(
        self, generation: m.GenerationId, step: int, spared: tuple[m.StateId, ...] = (), committed: int = 0
    ) -> None:
        super().release(generation, step, spared, committed)
        keep = [(state.generation.term, state.generation.n, state.step) for state in spared]
        self.intents.settle((generation.term, generation.n, step), keep)

    def upload(self, command: m.Upload) -> None:
        if command not in self._asked:
            self._asked.add(command)
            self.sim.after(self.sim.rng.uniform(0.05, 1.0), self._begin_upload, command)

    def _begin_upload(self, command: m.Upload) -> None:
        process = Process(self.sim.processes, self._lives, lambda: self.frozen_until)
        process.do(partial(self._put, process, command), partial(self._ended, command))

    def _held(self, command: m.Upload) -> list[Any]:
        state = (command.generation, command.step)
        found = [self.slots[name] for name in command.slots if name in self.slots]
        return [slot for slot in found if (slot.info.generation, slot.info.step) == state]

    def _put(self, process: Process, command: m.Upload) -> bytes:
        held = self._held(command)
        layout = self.sim.checks.specs[command.generation].layout
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        for slot in held:
            write_slot(folder / slot.info.slot, slot, layout)
        state = (command.generation.term, command.generation.n, command.step)
        client = Client(self.sim.objects, self.sim.processes, process, lambda: self.storage_down_until)
        client.save = f"intents/{command.step}-{state[0]}-{state[1]}-{self.name}-"
        paths = [folder / name for name in command.slots]
        return upload.upload_slots(paths, client, *state, owner=self.name, intents=self.intents).encode()

    def _ended(self, command: m.Upload, part: bytes | None, error: Exception | None) -> None:
        self._asked.discard(command)
        if error is not None and not isinstance(error, PicotronError):
            raise error
        gone = sorted(set(command.slots) - {slot.info.slot for slot in self._held(command)})
        told = f"gone:{gone[0]}" if gone else _told(error, command.slots)
        key = self.name, command.generation, command.step, command.slots
        self.sim.upload_parts[key] = None if told else part
        self.report(m.Uploaded(self.name, command.generation, command.step, told, command.slots))


class StoreShell(Shell):
    """Coordinator with a real ``RunStore``."""

    sim: StoreSim

    def __init__(self, sim: StoreSim) -> None:
        super().__init__(sim)
        self._process = Process(sim.processes, lambda: self.alive, lambda: self.paused_until)
        self._asking = Process(sim.processes, lambda: self.alive, lambda: self.paused_until)
        self._client = Client(sim.objects, sim.processes, self._process)
        sim.opening = self._client
        self._collecting = Process(sim.processes, lambda: self.alive, lambda: self.paused_until)
        self._committing = Process(sim.processes, lambda: self.alive, lambda: self.paused_until)
        self.store = StoreOfRun(sim.job, lambda step: None)
        self.store.processes, self.store.log_process = sim.processes, self._process
        self._uploads = UploadRequests()
        self._found: tuple[tuple[m.Commit, ...], tuple[m.GenerationSpec, ...]] | None = None

    def start(self) -> None:
        if self.alive:
            self._process.do(self.store.claim, self._claim_ended)

    def _claim_ended(self, term: int, error: Exception | None) -> None:
        if isinstance(error, StorageUnavailableError):
            self.sim.after(RETRY_S, self.start)
            return
        _expect_no_error(term, error)
        self._client.term = term
        self._claimed(term)

    def _begin(self, reached: list[SimNode]) -> None:
        if self._found is not None:
            super()._begin(reached)
            return
        running = any(node.spec is not None for node in reached)
        self._process.do(partial(self.store.state, not running), partial(self._state_ended, reached))

    def _state_ended(self, reached: list[SimNode], found: Any, error: Exception | None) -> None:
        if isinstance(error, StorageUnavailableError):
            self.sim.after(RETRY_S, self._begin, reached)
        elif isinstance(error, StorageError):
            self.sim.violation(f"term {self.term} cannot begin: {error}")
        else:
            _expect_no_error(found, error)
            self._found = found
            self._begin(reached)

    def read_log(self) -> tuple[tuple[m.Commit, ...], tuple[m.GenerationSpec, ...]]:
        assert self._found is not None
        return self._found

    def upload(self, command: m.Upload) -> None:
        self._uploads.ask(command)
        super().upload(command)

    def deliver(self, event: m.Event) -> None:
        if isinstance(event, m.Uploaded):
            key = event.node, event.generation, event.step, event.slots
            self._uploads.ended(event, None if event.error else self.sim.upload_parts.get(key))
        super().deliver(event)

    def append(self, command: m.AppendGeneration | m.AppendCommit) -> None:
        if isinstance(command, m.AppendGeneration):
            self._process.do(partial(self.store.append_generation, command.spec), self._appended)
        else:
            parts = self._uploads.parts(command)
            work = partial(self.store.commit, command.generation, command.step, parts)
            self._committing.do(work, self._appended)

    def _appended(self, event: m.Appended, error: Exception | None) -> None:
        _expect_no_error(event, error)
        if event.kind == "commit" and event.seq:
            self._uploads.forget(event.generation, event.step)
            self._collecting.do(self.store.collect_garbage, self._collected)
        self.deliver(event)

    def _collected(self, put_off: str, error: Exception | None) -> None:
        _expect_no_error(put_off, error)
        if retired := self.store.take_retired():
            self.deliver(m.Retired(retired))

    def ask_newest(self, answer: Callable[[bool | None], None]) -> None:
        self._asking.do(self.store.is_newest, lambda newest, error: answer(newest))

    def sum_up(self) -> None:
        self._process.do(partial(self.store.finish, {"status": "stopped"}), lambda summary, error: None)


class StoreSim(Sim):
    """Simulated run whose storage is real code over objects in memory."""

    node_class = StoreNode
    shell_class = StoreShell

    def __init__(self, seed: int, job: JobConfig, choose: Choose, checks: Observer) -> None:
        saves = {"interval_steps": 4, "gc_grace_s": 4.0}  # many, so that collections and saves meet
        job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=saves)})
        super().__init__(seed, job, choose, checks)
        self.folder = Path(tempfile.mkdtemp(prefix="picotron-simulation-", dir="/dev/shm"))
        self.processes, self.objects = Processes(self), Objects(self)
        self.storage: StoreMirror = StoreMirror(self.objects)
        self.store_checks = StoreChecks(self, self.storage)
        self.upload_parts: dict[tuple[str, m.GenerationId, int, tuple[str, ...]], bytes | None] = {}
        self.opening: Client | None = None  # storage of the coordinator that is being made
        self._patches = [
            mock.patch.object(run_store, "open_storage", self._open),
            mock.patch.object(upload, "SMALL_BYTES", 1),  # each shard is a chunk of its own
            mock.patch.object(upload, "_THREADS", 1),  # calls come in one order
            mock.patch.object(
                deletion, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
            ),
            mock.patch.object(deletion, "BATCH", 2),  # so that commits and takeovers come amid a collection
            mock.patch.object(condemned, "MOST_NAMES", 5),
            mock.patch.object(gc, "DOUBT_S", 3.0),
            mock.patch.object(assembly_process, "INLINE_BYTES", 1 << 30),  # another process sees no objects
        ]
        for patch in self._patches:
            patch.start()
        logging.disable(logging.ERROR)  # thousands of refusals are part of it

    def _sleep(self, seconds: float) -> None:
        if (process := self.processes.current()) is not None:
            process.pause(seconds)

    def _open(self, *_: Any) -> Client | None:
        return self.opening

    def unreadable(self, source: m.Source) -> str:
        if source.kind != "commit":
            return super().unreadable(source)
        generation = source.generation
        assert generation is not None
        body = {"manifest": source.manifest, "digest": source.digest}
        body |= {"step": source.step, "term": generation.term, "n": generation.n}
        try:
            committed_manifest(Client(self.objects, self.processes, None), body)
        except CorruptError:
            return f"corrupt:{source.manifest}"
        return ""

    def usurp(self, client: Client) -> None:
        """Stop the coordinator amid a collection now and then, and have another one take its place."""
        shell = self.shell
        if shell is None or self.over or self.by_term.get(client.term) is not shell:
            return
        if self.now < self.quiet_at - LONGEST_S and self.rng.chance(USURPED):
            self.struck.append("usurped")
            self.struck_at, self.quiet_at = self.now, max(self.quiet_at, self.now + LONGEST_S)
            FAULTS["rival"](self)
            for node in list(self.nodes.values()):
                self.after(self.rng.uniform(2.0, 9.0), node.restart)  # agents die alone meanwhile

    def settle(self) -> None:
        self.processes.close()
        self.store_checks.settle()

    def close(self) -> None:
        self.processes.close()
        for patch in self._patches:
            patch.stop()
        logging.disable(logging.NOTSET)
        shutil.rmtree(self.folder)


def simulate_store(seed: int) -> Report:
    """Run one seed; some runs go back before a bad step, and so make commits void."""
    rewinds = seed % 4 == 3
    return simulate(seed, bad_step=BAD_STEP * rewinds, rewind=rewinds, world=StoreSim)
