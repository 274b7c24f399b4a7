"""What one rank does on its own device in the tests of main paths; on a CPU in a rehearsal."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel import compiled_code
from picotron_ray.train import step_sync
from picotron_ray.train.engine import build_engine
from picotron_ray.train.step_sync import Contribution, exchange
from tests.support.gloo.devices import group_options, own_device
from tests.support.gloo.parallel_jobs.matrix_jobs import batch
from tests.support.gloo.pool import Job

REHEARSED_BACKEND = "aot_eager"
"""Of torch.compile on a CPU: all of it but the compiler of kernels, which takes half a minute there."""


def raise_on_waits(mode: str) -> None:
    """``error``: torch raises where the host waits; ``default``: not. It warns that it sees not all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """On CUDA torch raises inside where the host would wait for the device."""
    if device.type != "cuda":
        yield
        return
    raise_on_waits("error")
    try:
        yield
    finally:
        raise_on_waits("default")


def quiet_steps(job: Job, config: JobConfig, layout: Layout, kind: str) -> tuple[int, list[float]]:
    """Six steps, the last three of which may wait in the seam alone; how often there, and all losses."""
    device, reads = own_device(kind), 0
    groups = job.groups(**group_options(device))
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, device)
    engine.initialise(config.seed)
    seam = step_sync.to_host

    def to_host(numbers: Tensor) -> Tensor:
        nonlocal reads
        reads += 1
        if device.type == "cuda":
            raise_on_waits("default")
        found = seam(numbers)
        if device.type == "cuda" and reads > 3:
            raise_on_waits("error")
        return found

    def step(number: int) -> float:
        feed = batch(config, layout, layout.coordinates(job.rank).dp, number)
        loss, norm = engine.gradients_of(feed)
        agreed = exchange(Contribution(loss, norm, step=number), layout, device)
        engine.optimizer_step(0.01)
        return agreed.loss_sum

    with patch.object(step_sync, "to_host", to_host):
        losses = [step(number) for number in (1, 2, 3)]
        with no_waits(device):
            losses += [step(number) for number in (4, 5, 6)]
    engine.close()
    groups.close()
    gc.collect()
    return reads, losses


def compiled_generations(
    job: Job, config: JobConfig, layouts: list[Layout], kind: str
) -> list[tuple[tuple[str, ...], list[float], int]]:
    """Per generation: what was applied, two losses, and how many graphs this process has compiled so far."""
    from torch._dynamo.utils import counters

    device, found = own_device(kind), []
    counters.clear()
    with patch.object(compiled_code, "BACKEND", "inductor" if kind == "cuda" else REHEARSED_BACKEND):
        for number, layout in enumerate(layouts):
            again = Job(job.host, job.port, f"{job.prefix}/{number}", job.rank, job.world_size)
            groups = again.groups(**group_options(device))
            groups.connect()
            engine = build_engine(config, layout, job.rank, groups, device)
            engine.initialise(config.seed)
            losses = []
            for step in (1, 2):
                feed = batch(config, layout, layout.coordinates(job.rank).dp, step)
                loss, norm = engine.gradients_of(feed)
                losses.append(exchange(Contribution(loss, norm, step=step), layout, device).loss_sum)
                engine.optimizer_step(0.01)
            found.append((engine.applied, losses, counters["stats"]["unique_graphs"]))
            engine.close()
            groups.close()
            gc.collect()
    compiled_code.CODE.drop()
    return found
