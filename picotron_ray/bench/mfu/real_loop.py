"""Segment of ``bench mfu`` that trains as a worker of the service does: by `GenerationRun`, without Ray.

What the base leaves out is there: the step's exchange, ledger lines, heartbeats, and snapshots into slots of
host memory. Timed are whole intervals between snapshots, so that the mean of the steps holds each one's cost
as often as a run pays it.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from picotron_ray.bench.mfu.figures import Timed, timed
from picotron_ray.bench.mfu.settings import NEVER, Setting
from picotron_ray.checkpoint.shard_service.channel import Endpoint
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.data.dataset import DataSplits
from picotron_ray.errors import PeerLostError, PicotronError, SlotUnreachableError
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.generation import GenerationRun
from picotron_ray.runtime.worker.resources import WorkerResources
from picotron_ray.train.step_sync import STOP
from picotron_ray.train.training_state import MadeWeights

NODE, TERM = "node", 1
WARM = 2
"""First steps that are never timed: one makes what later ones find, and one is accounted."""
PATIENCE = 20
"""Times the steps asked for that may pass until they are whole intervals."""


class RealLoop:
    """Trains settings of the kind ``loop`` on one rank, each as a generation; the slots outlive them.

    Args:
        folder: of the run's slots and pages; all ranks share it.
        made: initial weights that other segments have made, or will want.
    """

    def __init__(
        self, folder: Path, rank: int, device: torch.device, data: DataSplits, made: MadeWeights
    ) -> None:
        self._folder, self._rank, self._device, self._data, self._made = folder, rank, device, data, made
        self._pool: SlotPool | None = None

    def run(self, setting: Setting, number: int, steps: int, warmup: int) -> dict[str, Any]:
        """Train until enough steps are timed.

        Args:
            number: of the generation; no other one has it.

        Returns ``steps_s`` (of rank 0; others: empty) and ``loop``: what snapshots have cost this rank.
        Raises PicotronError where the generation ends otherwise, or no whole interval comes.
        """
        run = self._generation(setting, number)
        watch = _TimedSteps(run, self._page, steps, max(warmup, WARM), setting)
        if self._rank == 0:
            self._page.on_phase = watch.on_phase
        outcome = run.run()
        self._pool = self._resources.pool
        for slot in self._pool.slots if self._pool else ():
            slot.set_pinned(False)  # as after an upload
        if outcome.kind != "interrupted":
            error = PeerLostError if outcome.kind == FailureKind.PEER_LOST else PicotronError
            raise error(outcome.detail or f"the generation ended with {outcome.kind}")
        if self._rank == 0 and watch.found is None:
            raise PicotronError(
                f"saw no whole interval between snapshots in {watch.most} steps; give more --steps, or"
                " snapshot.interval_steps"
            )
        found = watch.found or Timed([], 0)
        page = self._page
        figures = {name: page.value(name) for name in ("wait_s", "snapshot_s", "skipped")}
        copies = [times._asdict() for times in (run.copies.taken if run.copies else ())]
        return {
            "steps_s": found.steps_s,
            "loop": {"snapshots": found.snapshots, **figures, "copies": copies},
        }

    def _generation(self, setting: Setting, number: int) -> GenerationRun:
        job, layout, worker = setting.job, setting.layout, f"rank-{self._rank}"
        self._page = Page(self._folder / f"{worker}.page", job.elastic)
        self._resources = WorkerResources(
            job=job,
            worker=worker,
            node=NODE,
            folder=self._folder,
            device=self._device,
            data=self._data,
            page=self._page,
            storage=partial(open_storage, job.storage, job.name),
            find_service=_no_service,
            pool=self._pool,
            made=self._made,
        )
        members = tuple(Member(f"rank-{rank}", NODE) for rank in range(layout.world_size))
        spec = GenerationSpec(GenerationId(TERM, number), members, layout, Source("init"), "bench mfu")
        store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return GenerationRun(self._resources, spec, store)


class _TimedSteps:
    """Notes when steps begin on rank 0, and asks all to stop once enough of them are timed."""

    def __init__(self, run: GenerationRun, page: Page, steps: int, warmup: int, setting: Setting) -> None:
        self._run, self._page, self._steps, self._warmup = run, page, steps, warmup
        self._snapshots = setting.job.snapshot.interval_steps != NEVER
        self.most = warmup + PATIENCE * steps
        self._began_s: dict[int, float] = {}
        self._sealed: list[int] = []
        self.found: Timed | None = None

    def on_phase(self, step: int, phase: str) -> None:
        if phase != "data" or self.found is not None:
            return
        self._began_s[step] = time.perf_counter()
        sealed = int(self._page.value("sealed"))
        if sealed >= 0 and sealed not in self._sealed[-1:]:
            self._sealed.append(sealed)
        self.found = timed(self._began_s, self._sealed, self._warmup, self._steps, snapshots=self._snapshots)
        if self.found is not None or step >= self.most:
            self._run.interrupt(STOP)


def _no_service(node: str, meanwhile: Any) -> Endpoint:
    raise SlotUnreachableError(f"{node}: all slots are on this machine")
