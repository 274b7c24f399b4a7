"""Worker: a Ray actor that owns one GPU (or one CPU slot) and lives through many generations.

Between generations the process, its CUDA context, imports, dataset and compiled code stay. Every control
call carries the coordinator's term, and an older one is refused; every call may come twice. In particular
``run_generation`` for the generation that is running joins it, and for one that has ended returns its
outcome again: that is how a restarted coordinator adopts a run. The outcome needs no second home in the
agent for that: while the worker lives it remembers, and when it is dead its generation is over anyway.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from functools import partial
from typing import Any

import ray
import torch

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Outcome
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.errors import FencedError
from picotron_ray.failures import FailureKind
from picotron_ray.observability.logs.lines import Place
from picotron_ray.observability.spans import trace_of
from picotron_ray.runtime import process_log
from picotron_ray.runtime.chaos.worker_chaos import WorkerChaos
from picotron_ray.runtime.garbage import set_apart
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.ray_cluster.data_notes import leave_note
from picotron_ray.runtime.ray_cluster.interfaces import carry_collectives
from picotron_ray.runtime.ray_cluster.names import cache_folder, ledger_folder, node_folder
from picotron_ray.runtime.ray_cluster.private_folder import write_text
from picotron_ray.runtime.worker.allocator import choose_allocator
from picotron_ray.runtime.worker.generation import GenerationRun
from picotron_ray.runtime.worker.nccl_settings import prepare_nccl, prepare_recorder
from picotron_ray.runtime.worker.resources import WorkerResources
from picotron_ray.runtime.worker.slot_service import find_service
from picotron_ray.runtime.worker.step_telemetry import make_page
from picotron_ray.runtime.worker.testimony import testify
from picotron_ray.train.determinism import prepare_cublas
from picotron_ray.train.optim.quantized_state import codebook_of
from picotron_ray.train.precision.precision import check_precision
from picotron_ray.train.step_sync import SNAPSHOT, STOP

log = logging.getLogger(__name__)
MIDDLE = 1  # of the garbage collector's generations
MOST_JOINS = 4
JOIN_S = 1.0
FLAGS = {"boundary": STOP, "snapshot": SNAPSHOT, "hard": None}


class Worker:
    """Ray actor. Several methods run at a time; ``run_generation`` occupies one of its threads."""

    def __init__(self, job: dict[str, Any], worker: str, node: str, slot_bytes: int = 0) -> None:
        torch.set_num_threads(1)
        self._job = JobConfig.model_validate(job)
        carry_collectives(self._job, ray.util.get_node_ip_address(), os.environ)
        prepare_cublas(self._job, os.environ)  # before anything multiplies
        preload(self._job)
        self._chaos = WorkerChaos(self._job.chaos, self._open_storage)
        self._lock = threading.Lock()
        self._term = 0
        self._run: GenerationRun | None = None
        self._joins = 0  # calls that joined a generation that runs
        self._storage: Storage | None = None
        device = self._device()
        check_precision(self._job, device)  # a node may have several kinds of GPU
        path = node_folder(self._job.snapshot.folder, self._job.name, node)
        prepare_recorder(os.environ, self._job.debug.record_operations)
        OPERATIONS.keep(self._job.debug.record_operations)
        testify(path, worker)
        if device.type == "cuda":
            prepare_nccl(os.environ)
            choose_allocator(self._job.memory.allocator)
        page = Page(path / f"{worker}.page", self._job.elastic, self._chaos)
        process_log.place(partial(place_of, page, trace_of(self._job)))
        data = open_data(self._job, cache_folder(), evaluated=True)
        leave_note(path, worker, data.fingerprint)
        page.put(baseline_loss=data.bigram_entropy, spins=device.type == "cuda")
        self._resources = WorkerResources(
            job=self._job,
            worker=worker,
            node=node,
            folder=path,
            device=device,
            data=data,
            page=page,
            storage=self._open_storage,
            ledger=ledger_folder(path),
            find_service=partial(find_service, self._job.name, self._job.snapshot.fetch_timeout_s),
            slot_bytes=slot_bytes,
            telemetry=make_page(path, worker, device, self._job.telemetry.interval_s),
        )
        set_apart()

    def _device(self) -> torch.device:
        if self._job.cluster.device == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        torch.cuda.set_device(0)  # Ray shows each worker its own GPU alone
        return torch.device("cuda", 0)

    def _open_storage(self) -> Storage:
        if self._storage is None:
            answered = self._resources.page.storage_answered
            self._storage = open_storage(self._job.storage, self._job.name, answered)
        return self._storage

    # --- called through Ray ------------------------------------------------------------------------------

    def ready(self) -> str:
        """Answer once the constructor is through; returns the fingerprint of the data it sees."""
        return self._resources.data.fingerprint

    def run_generation(
        self, term: int, spec: GenerationSpec, store: tuple[str, int] | None
    ) -> Outcome | None:
        """Take part in a generation, or join one, or repeat the outcome of one that has ended.

        Without the address of a store no new one is begun. Each call that joins takes one of the actor's
        threads, and a generation may outlast many coordinators: of more than ``MOST_JOINS`` the oldest are
        answered with None, to be made again by whoever still waits.

        Raises:
            FencedError: the call is of a coordinator that was replaced.
        """
        with self._lock:
            if not self._accept(term):
                raise FencedError(
                    f"refused: term {term} is older than {self._term}; another coordinator took over"
                )
            if self._run is not None and spec.id < self._run.spec.id:
                detail = f"refused: {spec.id} is older than {self._run.spec.id}"
                return Outcome(self._resources.worker, spec.id, FailureKind.FAILED, -1, detail)
            previous = self._run
            joined = previous is not None and previous.spec.id == spec.id
            if not joined and store is None:
                return Outcome(
                    self._resources.worker, spec.id, FailureKind.PEER_LOST, -1, "no rendezvous store"
                )
            if not joined:
                assert store is not None
                if previous is not None and not previous.done.is_set():
                    previous.interrupt(None)  # its coordinator is gone, and with it the interrupt
                self._run = GenerationRun(self._resources, spec, store)
            run = self._run
            self._joins += joined
            joins = self._joins
        assert run is not None
        if joined:
            while not run.done.wait(JOIN_S):
                if self._joins - joins >= MOST_JOINS:
                    return None
        else:
            if previous is not None:
                previous.done.wait()
            try:
                self._remember(spec)
                self._chaos.rank = run.rank
                run.run()
            except BaseException:
                run.done.set()  # later generations wait for it
                raise
            set_apart(MIDDLE)  # leaving it collected the rest
        assert run.outcome is not None
        return run.outcome

    def interrupt(self, term: int, generation: tuple[int, int], mode: str) -> bool:
        """Leave (``hard``: now, ``boundary``: after the step at hand) or snapshot; True where it applied."""
        run = self._current(term, generation)
        if run is None:
            return False
        run.interrupt(FLAGS[mode])
        return True

    def committed(self, term: int, generation: tuple[int, int], step: int) -> bool:
        """Drop ledger lines up to ``step``: they are in storage."""
        run = self._current(term, generation)
        if run is None:
            return False
        run.committed(step)
        return True

    def tool(self, term: int, generation: tuple[int, int], order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order of a person's tool (`tools.worker_tools`); returns its answer."""
        if self._current(term, generation) is None:
            return {"refused": "its generation is over; ask again once the run trains"}
        return self._resources.tools.order(order)

    # --- helpers -------------------------------------------------------------------------------------

    def _accept(self, term: int) -> bool:
        """Whether a call is of the newest term; one of a coordinator that was replaced is refused."""
        if term < self._term:
            return False
        self._term = term
        return True

    def _current(self, term: int, generation: tuple[int, int]) -> GenerationRun | None:
        with self._lock:
            if not self._accept(term):
                return None
            run = self._run
        if run is None or run.done.is_set() or run.spec.id != GenerationId(*generation):
            return None
        return run

    def _remember(self, spec: GenerationSpec) -> None:
        """Leave the spec where the agent finds it, for a coordinator that was not there when it began.

        Where that cannot be written, other workers' may tell of the generation; training needs none.
        """
        path = self._resources.folder / f"{self._resources.worker}.spec"
        try:
            write_text(path, json.dumps(plain(spec)))
        except OSError as error:
            log.warning("generation %s is not noted for a coordinator that restarts: %s", spec.id, error)


def place_of(page: Page, trace: str | None = None) -> Place:
    """Place in training of a worker; ``trace``: that its records belong to."""
    term, n, rank, step = (int(page.value(name)) for name in ("term", "n", "rank", "step"))
    return Place(f"{term}.{n}", rank, step, trace) if term else Place(trace=trace)


def preload(job: JobConfig) -> None:
    """Import now what a layout of this job may need, so that no recovery and no first step waits for it."""
    import torch._dynamo  # the first step of an optimizer imports it, which takes a second

    if job.layout.pp != 1:
        import picotron_ray.parallel.pipeline.pipeline  # noqa: F401
    if job.optimizer.moments == "8bit":
        codebook_of(True, torch.device("cpu"))  # torchao takes seconds to import
