"""Part of one worker in one generation: groups, build, restore, loop, and an orderly way out.

Any end of the loop leads the same way out. A clean live state (no optimizer write was under way) that is not
sealed yet is flushed into a slot. Then every reference to the process groups is dropped and they are closed,
so that the next generation starts in the same process. The first rung of the recovery ladder, live state, is
thereby a slot like any other.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from picotron_ray.checkpoint.snapshot.slot_format import SlotKey, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.import_commit import weights_only
from picotron_ray.checkpoint.store.manifest import Identity, Manifest, load_manifest
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import StateTensor, restore
from picotron_ray.comm.process_groups import ProcessGroups
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec, Outcome, OutcomeKind, SlotInfo
from picotron_ray.data.dataset import DataSplits
from picotron_ray.data.loader import BatchLoader
from picotron_ray.errors import CorruptError, NumericsError, PeerLostError, StorageError
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.memory_limit import limit_memory
from picotron_ray.runtime.worker.storage_wait import StorageWait
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.loop import Loop, Requests
from picotron_ray.train.precision.gradient_variability import GradientVariability
from picotron_ray.train.snapshot import Snapshotter, SnapshotWriter
from picotron_ray.train.step_sync import STOP
from picotron_ray.train.update_policy import UpdatePolicy

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerResources:
    """Resources that a worker keeps between generations."""

    job: JobConfig
    worker: str
    node: str
    folder: Path
    device: torch.device
    data: DataSplits
    page: Page
    storage: Callable[[], Storage]
    fetch_slot: Callable[[SlotInfo], bytes]  # a slot that lies on another node
    pool: SlotPool | None = None  # made by the first generation, which knows how large the state is
    variability: GradientVariability = field(
        default_factory=GradientVariability
    )  # of the parts' gradients, so far
    limited: bool = False  # its memory, from the first generation's first step on


class GenerationRun:
    """Run of one generation.

    It runs once, in the thread that calls ``run``; ``interrupt`` and ``committed`` come from other threads.
    """

    def __init__(self, resources: WorkerResources, spec: GenerationSpec, store: tuple[str, int]) -> None:
        self.spec = spec
        self.outcome: Outcome | None = None
        self.done = threading.Event()
        self._resources = resources
        self.rank = next(i for i, member in enumerate(spec.members) if member.worker == resources.worker)
        self._requests = Requests()
        self._updates = UpdatePolicy(resources.job)
        self._interrupted = False
        self._tail: list[str] = []
        self._engine: Engine | None = None
        self._snapshots: Snapshotter | None = None
        self._loader: BatchLoader | None = None
        self._groups = ProcessGroups(
            host=store[0],
            port=store[1],
            prefix=str(spec.id),
            rank=self.rank,
            world_size=len(spec.members),
            backend="nccl" if resources.device.type == "cuda" else "gloo",
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

    def committed(self, step: int) -> None:
        """Drop ledger lines up to ``step``: they are in storage, snapshots need not carry them any more."""
        # the loop appends at the end while this drops from the front: both are single list operations
        lines = list(self._tail)
        keep = next((i for i, line in enumerate(lines) if json.loads(line)["step"] > step), len(lines))
        del self._tail[:keep]

    # --- the generation ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Take part until the end of training, an interrupt or a fault; never raises."""
        try:
            kind, detail = self._train(), ""
        except Exception as error:
            kind, detail = self._judge(error)
            if kind is FailureKind.FAILED:
                log.exception("generation %s failed on rank %d", self.spec.id, self.rank)
            error.__traceback__ = None  # its frames hold the model and the groups
        step = self._leave()
        first_step_at_s = self._resources.page.value("first_step_at_s")
        self.outcome = Outcome(self._resources.worker, self.spec.id, kind, step, detail, first_step_at_s)
        self.done.set()
        return self.outcome

    def _train(self) -> OutcomeKind:
        resources, spec, page = self._resources, self.spec, self._resources.page
        page.begin(spec.id.term, spec.id.n, self.rank, spec.resume_step)
        page.phase("rendezvous")
        self._groups.connect()
        page.phase("build")
        self._engine = build_engine(
            resources.job, spec.layout, self.rank, self._groups, resources.device, resources.variability
        )
        page.put(built_at_s=time.time())
        applied = "; ".join(self._engine.applied) or "one process"
        print(f"generation {spec.id} rank {self.rank}: {spec.layout}: {applied}", flush=True)
        page.phase("restore")
        self._restore(self._engine)
        page.put(clean=spec.resume_step)
        self._raise_if_interrupted()
        at = spec.layout.coordinates(self.rank)
        eval_batches = resources.data.eval_batches(spec.layout, at.dp, resources.job.evaluate.samples)
        if policy := self._engine.adapt(eval_batches):
            full = sorted(set(policy.sensitivity) - policy.low)
            print(
                f"generation {spec.id} rank {self.rank}: {resources.job.precision} adds"
                f" {policy.error:.1e} to the loss; in full precision: {', '.join(full) or 'nothing'}",
                flush=True,
            )
        self._loader = BatchLoader(
            resources.data.train,
            seed=resources.job.seed,
            layout=spec.layout,
            dp_index=at.dp,
            global_batch=resources.job.data.global_batch,
            start_step=spec.resume_step,
            depth=resources.job.data.prefetch_steps,
        )
        self._snapshots = self._snapshotter(self._engine.state())
        loop = Loop(
            job=resources.job,
            layout=spec.layout,
            identity={"term": spec.id.term, "n": spec.id.n},
            rank=self.rank,
            device=resources.device,
            engine=self._engine,
            loader=self._loader,
            eval_batches=eval_batches,
            snapshots=self._snapshots,
            page=page,
            requests=self._requests,
            updates=self._updates,
            tail=self._tail,
            start_step=spec.resume_step,
        )
        limit = resources.job.cluster.worker_memory_bytes
        if limit is not None and not resources.limited:  # the threads' stacks are there by now
            limit_memory(limit)
            resources.limited = True
        page.put(restored_at_s=time.time())
        return loop.run()

    def _restore(self, engine: Engine) -> None:
        source, resources = self.spec.source, self._resources
        if source.kind == "init":
            if resources.job.init_from.run is not None:
                raise StorageError(f"the commit of run {resources.job.init_from.run} to start from is gone")
            engine.initialise(resources.job.seed)
        elif source.kind == "slots":
            slots = [(info.slot, self._open_slot(info)) for info in source.slots]
            reader = SlotSource(slots)
            restore(engine.state(), reader)
            self._tail.extend(reader.views[0].header.ledger)
            self._updates.restore(reader.views[0].header.extra)
        else:
            wait = StorageWait(resources.page, resources.job.storage, self._leave_if_asked)
            wait.read(lambda: self._restore_commit(engine))
            self._groups.wait_for_all("restored", wait.go_on)
            resources.page.phase("restore")
        engine.set_step(source.step, self._updates.skipped)

    def _restore_commit(self, engine: Engine) -> None:
        storage = self._resources.storage()
        manifest = self._manifest(storage)
        if weights_only(manifest):
            engine.initialise(self._resources.job.seed)  # moments of zero; the weights are overwritten
        state = engine.weights() if weights_only(manifest) else engine.state()
        restore(state, CommitSource(storage, manifest))
        self._updates.restore(manifest.extra)

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
        if resources.pool is None:
            capacity = slot_bytes([tensor.shard for tensor in state if tensor.primary])
            resources.pool = SlotPool(
                resources.folder, resources.worker, resources.job.snapshot.slots, capacity
            )
        nodes = [member.node for member in spec.members]
        identity = (spec.id.term, spec.id.n)
        writer = SnapshotWriter.of(identity, self.rank, spec.layout, nodes, resources.job.data.global_batch)
        return Snapshotter(
            pool=resources.pool,
            writer=writer,
            state=state,
            protected=self._protected(),
            on_sealed=self._sealed,
            on_phase=self._copying,
            extra=self._updates.extra,
        )

    def _protected(self) -> SlotKey:
        """Key of the state that this generation came from.

        It must stay until a newer one is sealed everywhere.
        """
        source = self.spec.source
        if source.kind == "slots" and source.generation is not None:
            return (source.generation.term, source.generation.n, source.step)
        return (self.spec.id.term, self.spec.id.n, -1)

    def _sealed(self, step: int, pinned: bool, seconds: float) -> None:
        assert self._snapshots is not None
        self._resources.page.put(snapshot_s=seconds, skipped=self._snapshots.skipped, sealed=step)
        if self._resources.device.type == "cuda":
            self._resources.page.put(
                cuda_allocated_bytes=torch.cuda.memory_allocated(),
                cuda_reserved_bytes=torch.cuda.memory_reserved(),
            )
        if pinned:
            self._resources.page.put(pinned=step)

    def _copying(self, phase: str) -> None:
        """Let a scripted fault strike with a slot half written; the loop's own phase stays as it is."""
        page = self._resources.page
        if page.on_phase is not None:
            page.on_phase(page.computing_step, phase)

    def _open_slot(self, info: SlotInfo) -> Path | bytes:
        resources = self._resources
        return resources.folder / info.slot if info.node == resources.node else resources.fetch_slot(info)

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise PeerLostError("interrupted before the first step")

    def _judge(self, error: Exception) -> tuple[OutcomeKind, str]:
        if isinstance(error, CorruptError):
            where = error.where if self.spec.source.kind == "slots" else self.spec.source.manifest
            return FailureKind.FAILED, f"corrupt:{where}"
        if isinstance(error, NumericsError):
            return FailureKind.NUMERICS, str(error)
        if self._interrupted:
            return "interrupted", ""
        if _out_of_memory(error):
            return FailureKind.FAILED, f"oom: {error}"
        if self._groups.lost_peer(error):
            return FailureKind.PEER_LOST, str(error)[:200]
        return FailureKind.FAILED, f"error: {type(error).__name__}: {error}"

    def _leave(self) -> int:
        """Flush the clean state and close everything; returns the step of the clean state, -1 if none."""
        page = self._resources.page
        clean = int(page.value("clean"))
        if self._snapshots is not None:
            page.phase("flush")
            clean = self._flushed(self._snapshots, clean)
            self._snapshots.close()
        if self._loader is not None:
            self._loader.close()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._snapshots = self._loader = None
        gc.collect()
        self._groups.close()
        page.put(clean=-1)
        page.phase("idle")
        page.forget_limits()
        return clean

    def _flushed(self, snapshots: Snapshotter, clean: int) -> int:
        """Seal the live state of step ``clean``, if any; -1 where there is none that may be kept."""
        try:
            if clean >= 0:
                snapshots.flush(clean, self._tail, pinned=False)
        except NumericsError as error:
            log.warning("generation %s on rank %d: %s", self.spec.id, self.rank, error)
            return -1
        return clean


def _out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the device or of the host, whose allocator has no error class in torch."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
