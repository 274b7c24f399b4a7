"""Part of one worker in one generation: groups, build, restore, loop, and an orderly way out.

Any end of the loop leads the same way out. A clean live state (no optimizer write was under way) that is not
sealed yet is flushed into a slot: the first rung of the recovery ladder is a slot like any other. Then each
reference to the process groups is dropped and they are closed, and the next generation starts in the process.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from picotron_ray.checkpoint.snapshot.ledger_tail import LedgerTail
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.checkpoint.snapshot.slot_sweep import owner
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.import_commit import weights_only
from picotron_ray.checkpoint.store.manifest import INITIAL_WEIGHTS, Identity, Manifest, load_manifest
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.store.verify import quarantine_chunk
from picotron_ray.checkpoint.torch_state import StateTensor, restore
from picotron_ray.comm.process_groups import ProcessGroups
from picotron_ray.config.support.kernels import compiles
from picotron_ray.coordinator.messages import GenerationSpec, Outcome, OutcomeKind
from picotron_ray.data.loader import BatchLoader
from picotron_ray.errors import CorruptError, NumericsError, PeerLostError, StorageError
from picotron_ray.failures import FailureKind
from picotron_ray.models.layers.init import VERSION
from picotron_ray.runtime.phase_limits import StepWork
from picotron_ray.runtime.worker.compile_phase import compile_phase
from picotron_ray.runtime.worker.generation_memory import GenerationMemory
from picotron_ray.runtime.worker.generation_words import applied_words, policy_words, tell
from picotron_ray.runtime.worker.growth_phase import growth_phase, lock_slots
from picotron_ray.runtime.worker.outcomes import facts_of, judge, loads_told
from picotron_ray.runtime.worker.remote_slots import RemoteSlots, fetch_spilled
from picotron_ray.runtime.worker.replicas import check_of
from picotron_ray.runtime.worker.resources import WorkerResources
from picotron_ray.runtime.worker.slot_restore import SlotRestore
from picotron_ray.runtime.worker.step_telemetry import generation_clock
from picotron_ray.runtime.worker.storage_wait import StorageWait
from picotron_ray.train.disturbance import batches_of
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.evaluation import Evaluated
from picotron_ray.train.loop import Loop, Requests
from picotron_ray.train.passes import silent
from picotron_ray.train.snapshot import Snapshotter, SnapshotWriter, flush_bytes
from picotron_ray.train.state_copies import StateCopies, state_copies
from picotron_ray.train.step_sync import STOP
from picotron_ray.train.update_policy import UpdatePolicy

log = logging.getLogger(__name__)


class GenerationRun:
    """Run of one generation.

    It runs once, in the thread that calls ``run``; ``interrupt`` and ``committed`` come from other threads.
    """

    def __init__(self, resources: WorkerResources, spec: GenerationSpec, store: tuple[str, int]) -> None:
        self.spec, self._resources = spec, resources
        self._job = resources.job_of(spec)
        self.outcome: Outcome | None = None
        self.done = threading.Event()
        self.rank = next(i for i, member in enumerate(spec.members) if member.worker == resources.worker)
        self._requests, self._evaluated = Requests(), Evaluated()
        self._updates, self._stages = UpdatePolicy(self._job), resources.data.stage_record()
        self._interrupted = False
        self.copies: StateCopies | None = None
        self._initial_weights: int | None = None  # version of those that the run began with
        self._tail = LedgerTail(resources.ledger)
        self._engine: Engine | None = None
        self._snapshots: Snapshotter | None = None
        self._loader: BatchLoader | None = None
        self._memory = GenerationMemory(resources, self._job, spec, self.rank)
        warm = resources.stepped.issuperset(member.worker for member in spec.members)
        rows = self._job.data.global_batch
        self._work = StepWork.of(spec.layout, rows, warm=warm, compiles=compiles(self._job))
        self._groups = ProcessGroups(
            host=store[0],
            port=store[1],
            prefix=str(spec.id),
            rank=self.rank,
            world_size=len(spec.members),
            backend="nccl" if resources.device.type == "cuda" else "gloo",
            device=resources.device,
        )

    # --- called from other threads -------------------------------------------------------------------

    def interrupt(self, flag: int | None) -> None:
        """Ask this member to leave.

        Args:
            flag: asks all members, through the next step's exchange; None aborts the process groups at once.
        """
        if flag is not None:
            self._requests.add(flag)
            return
        self._interrupted = True
        self._groups.abort()
        parts: tuple[Any, ...] = (self._loader, self._snapshots)
        for part in filter(None, parts):
            part.stop_waiting()

    def committed(self, step: int) -> None:
        """Drop ledger lines up to ``step``: they are in storage, snapshots need not carry them any more."""
        self._tail.committed(step)

    # --- the generation ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Take part until the end of training, an interrupt or a fault; never raises."""
        facts: dict[str, Any] = {}
        try:
            with compile_phase(self._resources.page, self._job, self.spec.layout):
                kind, detail = self._train(), ""
        except Exception as error:
            kind, detail = self._judge(error)
            facts = facts_of(error)
            if kind is FailureKind.FAILED:
                log.exception("generation %s failed on rank %d", self.spec.id, self.rank)
            error.__traceback__ = None  # its frames hold the model and the groups
        facts["expert_loads"] = loads_told(self._engine, self.spec.layout, self.rank)
        try:
            step = self._leave()
        except Exception as error:
            step = -1
            log.exception("generation %s: rank %d could not leave in order", self.spec.id, self.rank)
            if not isinstance(kind, FailureKind):  # else that failure explains more
                kind, detail = FailureKind.FAILED, f"error: leaving: {type(error).__name__}: {error}"
            error.__traceback__ = None
        if first_step_at_s := self._resources.page.value("first_step_at_s"):
            self._resources.stepped = frozenset(member.worker for member in self.spec.members)
        self.outcome = Outcome(
            self._resources.worker, self.spec.id, kind, step, detail, first_step_at_s, **facts
        )
        self.done.set()
        return self.outcome

    def _train(self) -> OutcomeKind:
        resources, spec, page = self._resources, self.spec, self._resources.page
        page.begin(spec.id.term, spec.id.n, self.rank, spec.resume_step, self._work)
        page.phase("rendezvous")
        self._groups.connect()
        self._engine = self._built()
        page.phase("restore")
        self._restore(self._engine)
        page.put(clean=spec.resume_step)
        self._raise_if_interrupted()
        at = spec.layout.coordinates(self.rank)
        eval_batches = resources.data.eval_batches(spec.layout, at.dp, self._job.evaluate.samples)
        if self._job.adaptive_precision.error_bound is not None:
            page.phase("evaluate", self._job.elastic.first_step_timeout_s)
        if policy := self._engine.adapt(eval_batches):
            tell(spec, self.rank, policy_words(self._job.precision, policy))
        self._loader = BatchLoader(
            replace(resources.data.feed, stages=self._stages),
            layout=spec.layout,
            dp_index=at.dp,
            start_step=spec.resume_step,
            depth=self._job.data.prefetch_steps,
            passes_over=spec.passes_over,
            make=batches_of(self._job),
        )
        self._snapshots = self._snapshotter(self._engine.state())
        lock, wait = self._snapshots.lock_pages, self._groups.wait_for_all
        lock_slots(page, resources.device.type, lock, wait, self._leave_if_asked)
        clock = generation_clock(resources.telemetry, spec, self.rank, resources.device, self._memory.limited)
        self._engine.watch(clock.enter)
        loop = Loop(
            job=self._job,
            layout=spec.layout,
            identity={"term": spec.id.term, "n": spec.id.n},
            rank=self.rank,
            device=resources.device,
            engine=self._engine,
            loader=self._loader,
            eval_batches=eval_batches,
            eval_sets=resources.data.set_batches(spec.layout, at.dp),
            evaluated=self._evaluated,
            snapshots=self._snapshots,
            page=page,
            requests=self._requests,
            updates=self._updates,
            stages=self._stages,
            tail=self._tail,
            start_step=spec.resume_step,
            passes_over=spec.passes_over,
            memory=self._memory,
            clock=clock,
            tools=resources.tools.join(self.rank, self._requests, self._engine),
            replicas=check_of(self._job, spec, self.rank, self._engine, resources.device),
            check_peers=self._groups.check,
            tell=partial(tell, spec, self.rank) if self.rank == 0 else silent,
        )
        resources.limit_memory()  # the threads' stacks are there by now
        page.put(restored_at_s=time.time())
        return loop.run()

    def _built(self) -> Engine:
        """Build the engine, and say what was applied."""
        resources, page = self._resources, self._resources.page
        page.phase("build")
        engine = build_engine(
            self._job,
            self.spec.layout,
            self.rank,
            self._groups,
            resources.device,
            resources.variability,
            page.moved,
            self._memory.pools(),
        )
        self._memory.watch(engine)
        page.put(built_at_s=time.time())
        tell(self.spec, self.rank, applied_words(self.spec, engine.applied))
        return engine

    def _restore(self, engine: Engine) -> None:
        source, resources = self.spec.source, self._resources
        if source.kind == "init":
            if self._job.init_from.run is not None:
                raise StorageError(f"the commit of run {self._job.init_from.run} to start from is gone")
            engine.initialise(self._job.seed, resources.page.moved, resources.made)
            self._initial_weights = VERSION if self._job.model.builder is None else None
        elif source.kind == "slots":
            self._restore_slots(engine)
        else:
            wait = StorageWait(resources.page, self._job.storage, self._leave_if_asked)
            wait.read(lambda: self._restore_commit(engine))
            self._groups.wait_for_all("restored", wait.go_on)
            resources.page.phase("restore")
        engine.set_step(source.step, self._updates.skipped)

    def _restore_slots(self, engine: Engine) -> None:
        """Read the state from slots, of this node where it can be."""
        resources, state = self._resources, engine.state()
        others = RemoteSlots(resources.page, self._job.snapshot, resources.find_service, self._leave_if_asked)

        def read(source: SlotSource) -> None:
            restore(state, source, resources.page.moved)
            fetch_spilled(source.views[0], resources.ledger)

        with closing(others):
            holders = partial(engine.share_holders, self.spec.source.layout)
            slots = SlotRestore(self.spec, self.rank, resources.folder, self._protected(), others, holders)
            header = slots.read([tensor.shard for tensor in state], read).views[0].header
        self._tail.restore(header.ledger)
        self._take_over(header.extra)
        if slots.reads_far:  # else a first step would take as long as the slowest member's reading
            self._groups.wait_for_all("restored", others.wait)
        resources.page.phase("restore")

    def _restore_commit(self, engine: Engine) -> None:
        storage = self._resources.storage()
        manifest = self._manifest(storage)
        if weights_only(manifest):
            engine.initialise(self._job.seed, self._resources.page.moved)  # zero moments; weights follow
        state = engine.imported(manifest.tensors()) if weights_only(manifest) else engine.state()
        try:
            restore(state, CommitSource(storage, manifest), self._resources.page.moved)
        except CorruptError as error:
            if error.where.startswith("chunks/"):
                quarantine_chunk(storage, error.where, manifest.step)
            raise
        self._take_over(manifest.extra)

    def _take_over(self, extra: Mapping[str, Any]) -> None:
        """Go on with what the restored state says of its past."""
        self._updates.restore(extra)
        if self._stages is not None:
            self._stages.restore(extra)
        self._initial_weights = extra.get(INITIAL_WEIGHTS)

    def _extra(self) -> dict[str, Any]:
        """Return what slots keep of this state's past, besides the ledger."""
        known = {} if self._initial_weights is None else {INITIAL_WEIGHTS: self._initial_weights}
        stages = self._stages.extra() if self._stages else {}
        return self._updates.extra() | known | stages | self._evaluated.extra()

    def _leave_if_asked(self) -> None:
        """Leave before the first step, where no exchange takes the request to stop."""
        flags = self._requests.take()
        self._requests.add(flags)  # the first step's exchange takes them, where this one stays
        self._interrupted = self._interrupted or bool(flags & STOP)
        self._raise_if_interrupted()

    def _manifest(self, storage: Storage) -> Manifest:
        """The manifest that the log's commit entry names; CorruptError where another one lies there."""
        source = self.spec.source
        writer = source.generation
        identity = Identity(source.step, writer.term, writer.n) if writer else None
        return load_manifest(storage, source.manifest, source.digest, identity)

    def _snapshotter(self, state: list[StateTensor]) -> Snapshotter:
        resources, spec = self._resources, self.spec
        identity, nodes = (spec.id.term, spec.id.n), [member.node for member in spec.members]
        writer = SnapshotWriter.of(identity, self.rank, spec.layout, nodes, self._job.data.global_batch)
        if resources.pool is None:
            capacity = flush_bytes(state, writer.index, writer.count)
            resources.make_pool(self._job.snapshot.slots, capacity, self._dead_slots())
        assert resources.pool is not None
        self.copies = state_copies(resources.device)
        return Snapshotter(
            pool=resources.pool,
            writer=writer,
            state=state,
            protected=self._protected(),
            on_sealed=self._sealed,
            on_phase=self._copying,
            extra=self._extra,
            growth=lambda: growth_phase(resources.page),
            copies=self.copies,
        )

    def _dead_slots(self) -> bool:
        """Whether workers that are no members left slots here: the agent removes them once it may."""
        members = {member.worker for member in self.spec.members}
        return any(owner(path) not in members for path in self._resources.folder.glob(f"*{SUFFIX}"))

    def _protected(self) -> SlotKey:
        """Key of the state that this generation came from, which stays until a newer one is sealed."""
        source = self.spec.source
        if source.kind == "slots" and source.generation is not None:
            return (source.generation.term, source.generation.n, source.step)
        return (self.spec.id.term, self.spec.id.n, -1)

    def _sealed(self, step: int, pinned: bool, seconds: float) -> None:
        assert self._snapshots is not None
        self._resources.page.put(snapshot_s=seconds, skipped=self._snapshots.skipped, sealed=step)
        self._memory.note_cuda()
        if pinned:
            self._resources.page.put(pinned=step)

    def _copying(self, phase: str) -> None:
        """Let a scripted fault strike with a slot half written; the loop's own phase stays as it is."""
        page = self._resources.page
        if page.on_phase is not None:
            page.on_phase(page.computing_step, phase)

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise PeerLostError("interrupted before the first step")

    def _judge(self, error: Exception) -> tuple[OutcomeKind, str]:
        return judge(error, self.spec.source, self._interrupted, self._groups.lost_peer)

    def _leave(self) -> int:
        """Flush the clean state and close everything; returns the step of the clean state, -1 if none.

        Whatever raises, the rest is closed all the same; it is raised at the end.
        """
        page = self._resources.page
        clean = int(page.value("clean"))
        with ExitStack() as last:
            last.callback(self._left)
            self._close_at(last)
            if self._snapshots is not None:
                page.phase("flush")
                clean = self._flushed(self._snapshots, clean)
        return clean

    def _close_at(self, last: ExitStack) -> None:
        """Have snapshots, loader and engine closed, in this order; no frame that waits refers to them."""
        for part in (self._engine, self._loader, self._snapshots):
            if part is not None:
                last.callback(part.close)

    def _left(self) -> None:
        """Let go of the groups and everything that refers to them."""
        page = self._resources.page
        self._engine = self._snapshots = self._loader = None
        self._resources.tools.leave()
        self._memory.close()
        gc.collect()
        try:
            self._groups.close()
        finally:
            page.put(clean=-1)
            page.phase("idle")

    def _flushed(self, snapshots: Snapshotter, clean: int) -> int:
        """Seal the live state of step ``clean``, if any; -1 where there is none that may be kept."""
        try:
            if clean >= 0:
                snapshots.flush(clean, self._tail.lines(), pinned=False)
        except NumericsError as error:
            log.warning("generation %s on rank %d: %s", self.spec.id, self.rank, error)
            return -1
        return clean
