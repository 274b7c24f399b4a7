"""Resources of a worker that outlive its generations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import with_settings
from picotron_ray.config.support.fast_path import settled
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.data.dataset import DataSplits
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.telemetry_page import SUFFIX, TelemetryPage
from picotron_ray.runtime.worker.memory_limit import limit_memory
from picotron_ray.runtime.worker.remote_slots import Find
from picotron_ray.runtime.worker.tools.worker_tools import WorkerTools
from picotron_ray.train.page_locks import page_locks
from picotron_ray.train.precision.gradient_variability import GradientVariability
from picotron_ray.train.training_state import MadeWeights


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
    find_service: Find  # the shard service of another node
    slot_bytes: int = 0  # of a slot, as launch has planned it, a node's loss included
    ledger: Path | None = None  # folder for lines of the ledger that slots do not carry any more
    pool: SlotPool | None = None  # made by the first generation, which knows how large the state is
    variability: GradientVariability = field(
        default_factory=GradientVariability
    )  # of the parts' gradients, so far
    memory_ratios: dict[str, tuple[float, ...]] = field(
        default_factory=dict
    )  # measured bytes over the planner's, by class of memory, newest last
    stepped: frozenset[str] = frozenset()  # members of the last generation that took a step
    telemetry: TelemetryPage | None = None  # where steps are measured
    made: MadeWeights | None = None  # initial weights, kept for generations that begin anew; None: not kept
    limited: bool = False  # its memory, from the first generation's first step on
    tools: WorkerTools = field(init=False)

    def __post_init__(self) -> None:
        telemetry = None if self.telemetry is None else self.folder / f"{self.worker}{SUFFIX}"
        folder = self.ledger or self.folder
        self.tools = WorkerTools(self.job, self.page, self.worker, folder, self.device, telemetry, self.data)

    def job_of(self, spec: GenerationSpec) -> JobConfig:
        """Return the job as a generation runs it: with its settings, and what ``auto`` comes to in it."""
        return settled(with_settings(self.job, spec.settings), self.device.type, spec.layout)

    def make_pool(self, count: int, capacity: int, room_follows: bool) -> None:
        """Allocate the slots, each of ``capacity`` bytes or as launch has planned it.

        Args:
            room_follows: see `SlotPool`, as for what it raises.
        """
        locks, capacity = page_locks(self.device, self.folder), max(self.slot_bytes, capacity)
        self.pool = SlotPool(self.folder, self.worker, count, capacity, room_follows, locks)

    def limit_memory(self) -> None:
        """Hold the process to ``cluster.worker_memory_bytes`` from now on, where it is not yet."""
        limit = self.job.cluster.worker_memory_bytes
        if limit is not None and not self.limited:
            limit_memory(limit)
            self.limited = True
