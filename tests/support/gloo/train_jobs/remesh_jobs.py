"""Generations as a worker runs them, in the pool's processes: the test is their coordinator."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from picotron_ray.checkpoint.shard_service.channel import Endpoint
from picotron_ray.checkpoint.snapshot.slot_reader import open_slot
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec, Outcome
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.generation import GenerationRun
from picotron_ray.runtime.worker.resources import WorkerResources
from picotron_ray.runtime.worker.slot_restore import SlotRestore
from tests.support.gloo.devices import own_device
from tests.support.gloo.pool import Job

RESOURCES: dict[str, WorkerResources] = {}
TOLD_POLL_S = 0.005


def worker_name(pid: int) -> str:
    return f"worker-{pid}"


def resources_of(config: JobConfig, folder: Path, kind: str = "cpu") -> WorkerResources:
    """What this process keeps of a run between its generations."""
    if config.name not in RESOURCES:
        RESOURCES.clear()  # runs of earlier tests
        name = worker_name(os.getpid())
        RESOURCES[config.name] = WorkerResources(
            job=config,
            worker=name,
            node="node",
            folder=folder,
            device=own_device(kind),
            data=open_data(config, folder),
            page=Page(folder / f"{name}.page", config.elastic),
            storage=partial(open_storage, config.storage, config.name),
            find_service=no_service,
        )
    return RESOURCES[config.name]


def no_service(node: str, meanwhile: Callable[[], None]) -> Endpoint:
    raise AssertionError("all slots are on this node")


def generation(
    job: Job,
    config: JobConfig,
    spec: GenerationSpec,
    folder: str,
    kill: tuple[int, int, str],
    told: str,
    kind: str = "cpu",
) -> Outcome:
    """Take part in a generation; rank ``kill[0]`` dies from step ``kill[1]`` on, entering phase ``kill[2]``.

    Args:
        told: a file that stands for the coordinator's order to abort.
    """
    home = resources_of(config, Path(folder), kind)

    def on_phase(step: int, phase: str) -> None:
        rank, first, wanted = kill
        if job.rank == rank and step >= first and phase == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    home.page.on_phase = on_phase
    run = GenerationRun(home, spec, (job.host, job.port))
    threading.Thread(target=watch, args=(run, Path(told)), daemon=True).start()
    plain = SlotRestore._opened

    def opened(restore: SlotRestore, wanted: Sequence[Shard]) -> Any:
        check_holders(spec, Path(folder), restore._holders(wanted), wanted)
        return plain(restore, wanted)

    with patch.object(SlotRestore, "_opened", opened):
        return run.run()


def check_holders(
    spec: GenerationSpec, folder: Path, known: Collection[int], wanted: Sequence[Shard]
) -> None:
    """Compare the shares that were computed with what all slots of the state hold of what is wanted."""
    boxes: dict[str, list[Box]] = {}
    for shard in wanted:
        boxes.setdefault(shard.name, []).append(shard.box)
    useful = set[int]()
    for info in spec.source.slots:
        held = [entry.shard for entry in open_slot(folder / info.slot).shards]
        if any(s.box.intersect(box) is not None for s in held for box in boxes.get(s.name, ())):
            useful |= {part.group for part in info.fragments}
    assert set(known) == useful, f"{spec.source.layout}: computed {sorted(known)}, found {sorted(useful)}"


def watch(run: Any, told: Path) -> None:
    while not run.done.is_set():
        if told.exists():
            run.interrupt(None)
            return
        time.sleep(TOLD_POLL_S)
