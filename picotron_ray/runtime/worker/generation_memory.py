"""Memory of one worker in one generation: pools, the account of a step, modes, and the ladder at boundaries.

What to do is decided by `planner.memory_pressure`; here it is read, done and told. A rung that asks for a
layout that needs less is a line of the log: the coordinator sees the same peak in the telemetry, and decides.
One that refuses ends the generation as any lack of memory does, but between two steps, with a clean state:
nothing is lost, and the layout is not taken again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.parallel.memory.pools import POOLED, MemoryPools
from picotron_ray.parallel.memory.trace import MemoryAccount
from picotron_ray.planner.memory_causes import memory_by_cause
from picotron_ray.planner.memory_prediction import RECENT, predicted_class, predicted_peak, ratio_of
from picotron_ray.planner.memory_pressure import MODES, Ladder, MemoryReading, climb
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes
from picotron_ray.runtime.worker.memory_reading import HeldMemory, collect, held_memory, release_cached
from picotron_ray.runtime.worker.resources import WorkerResources
from picotron_ray.train.engine import Engine
from picotron_ray.train.memory_account import accounted_step, untraceable
from picotron_ray.train.step_memory import StepMemory

ACCOUNTED_STEP = 2
"""Of a generation: the first one makes what later ones find."""
CAUSES = {"gradient": "gradients", "optimizer": "optimizer", "activation": "activations"}
"""The planner's causes by class of memory."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class GenerationMemory(StepMemory):
    """Watches one generation's steps.

    Args:
        resources: of the worker; its history is read and added to.
        job: as the generation runs it, its settings included.
        spec: of the generation.
        rank: of this worker in it.
    """

    def __init__(self, resources: WorkerResources, job: JobConfig, spec: GenerationSpec, rank: int) -> None:
        self._resources, self._job, self._spec, self._rank = resources, job, spec, rank
        self._estimate = estimated(job, spec, rank)
        neighbours = sum(member.node == spec.members[rank].node for member in spec.members)
        self._share_bytes = host_bytes() // max(1, neighbours)
        self._engine: Engine | None = None
        self._taken = 0
        self._surplus = 0  # bytes of a step above what lives on between two
        self._peaks: list[tuple[int, float]] = []
        self._ladder = Ladder()
        resources.page.put(memory_mode=0)

    def pools(self) -> MemoryPools:
        """Make the pools that the job asks for."""
        resources = self._resources
        if not self._job.memory.preallocate or resources.device.type != "cuda":
            return MemoryPools()
        expected = {
            kind: predicted_class(kind, self._estimate[kind], resources.memory_ratios.get(kind, ()))
            for kind in POOLED
        }
        return MemoryPools(resources.device, expected)

    def watch(self, engine: Engine) -> None:
        """Account the steps of ``engine``."""
        self._engine = engine

    def step(self, step: int, take: Callable[[], T]) -> T:
        """Take a step, account it where it is its turn, and look at the allocator where that is due."""
        self._taken += 1
        memory = self._job.memory
        traced = memory.account and self._taken == ACCOUNTED_STEP and not untraceable(self._job)
        if traced and self._engine is not None:
            found, account = accounted_step(self._engine, lambda _: take())
            self._note(step, account)
        else:
            found = take()
        if self._taken == ACCOUNTED_STEP or step % memory.interval_steps == 0:
            self._look(step)
        return found

    def note_cuda(self) -> None:
        """Put what torch's allocator has of a CUDA device onto the page."""
        if self._resources.device.type == "cuda":
            self._resources.page.put(
                cuda_allocated_bytes=torch.cuda.memory_allocated(),
                cuda_reserved_bytes=torch.cuda.memory_reserved(),
            )

    def limited(self) -> HeldMemory | None:
        """Read what steps take of ``cluster.worker_memory_bytes``; None where no such limit is in force.

        Its peak adds what the accounted step took above what lives on between two.
        """
        resources = self._resources
        limit = self._job.cluster.worker_memory_bytes if resources.limited else None
        if not limit or resources.device.type == "cuda":
            return None
        held = held_memory(resources.device, self._share_bytes, limit)
        return replace(held, peak=held.peak + self._surplus)

    def close(self) -> None:
        """Let go of the engine."""
        self._engine = None

    # --- the account -------------------------------------------------------------------------------------

    def _note(self, step: int, account: MemoryAccount) -> None:
        resources, most = self._resources, account.most
        lasting = sum(most[kind] for kind in ("weights", "gradient", "optimizer"))
        self._surplus = max(0, account.peak_bytes - lasting)
        for kind in CAUSES:
            ratio = ratio_of(most[kind], self._estimate[kind])
            if ratio is not None:
                known = resources.memory_ratios.get(kind, ())
                resources.memory_ratios[kind] = (*known, ratio)[-RECENT:]
        resources.page.put(
            memory_peak_bytes=account.peak_bytes,
            **{f"memory_{kind}_bytes": nbytes for kind, nbytes in most.items()},
        )
        told = ", ".join(f"{kind} {nbytes / 1e6:,.1f}" for kind, nbytes in most.items())
        print(
            f"generation {self._spec.id} rank {self._rank}: memory of step {step} in MB: {told}; peak"
            f" {account.peak_bytes / 1e6:,.1f} of an estimated {self._estimate['total'] / 1e6:,.1f}",
            flush=True,
        )

    # --- the ladder --------------------------------------------------------------------------------------

    def _reading(self, step: int) -> MemoryReading:
        job, held = self._job, self.limited()
        if held is None:
            held = held_memory(self._resources.device, self._share_bytes, None)
        peak = held.peak
        self._peaks = [*self._peaks, (step, float(peak))][-RECENT:]
        predicted = float(peak)
        if len(self._peaks) > 2:
            predicted = predicted_peak(self._peaks, step + job.memory.interval_steps)
        return MemoryReading(held.allocated, held.reserved, peak, predicted, held.device, held.fragments)

    def _look(self, step: int) -> None:
        before = self._ladder
        self._ladder, why = climb(self._reading(step), before)
        where = f"generation {self._spec.id} rank {self._rank}: step {step}"
        if self._ladder.mode != before.mode:
            self._resources.page.put(memory_mode=MODES.index(self._ladder.mode))
            log.warning(
                "%s: memory mode %s, was %s: %s", where, self._ladder.mode, before.mode, why or "relieved"
            )
        rung = self._ladder.rung
        if rung == before.rung and rung != "refuse":
            return
        if rung == "release":
            release_cached(self._resources.device)
        elif rung == "collect":
            collect(self._resources.device)
        elif rung == "ask":
            log.warning("%s: needs cheaper recomputation or a smaller micro-batch: %s", where, why)
        elif rung == "refuse":
            raise torch.OutOfMemoryError(f"step {step}: the next steps will not fit: {why}")


def estimated(job: JobConfig, spec: GenerationSpec, rank: int) -> Mapping[str, float]:
    """The planner's bytes of a rank, by class of memory, and their total."""
    causes = memory_by_cause(job, spec.layout, spec.layout.coordinates(rank).pp)
    found = {kind: causes[cause] for kind, cause in CAUSES.items()}
    return {**found, "temporary": causes["buffers"], "total": causes["total"]}
