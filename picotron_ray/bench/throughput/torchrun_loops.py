"""Loops that the service's throughput is compared with, each a script for torchrun.

``engine`` is the service's own step (same engine, loader, layout, precision) with nothing around it: no
coordinator, agent, heartbeat page, ledger line, exchange of digests or snapshot. ``plain`` is what one
writes by hand: the same model in DistributedDataParallel, torch's AdamW and gradient clipping, fed by the
same loader. Both sum the loss over ranks every `LOG_STEPS` steps, as loops that log do (10 is torchtitan's
default), where the service does so in every step.

``torchrun --standalone --nproc-per-node 2 -m picotron_ray.bench.throughput.torchrun_loops engine JOB.json
COUNTER``: trains until it is ended; rank 0 leaves the number of the last finished step in the 8 bytes of
COUNTER.
"""

from __future__ import annotations

import itertools
import mmap
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_ray.bench.common.training import EngineTraining, PlainTraining, Training
from picotron_ray.bench.recovery.peers.replica import Replica
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.loader import BatchLoader
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.mesh import make_mesh
from picotron_ray.runtime.ray_cluster.names import cache_folder
from picotron_ray.train.engine import Engine

LOG_STEPS = 10


def engine_steps(job: JobConfig, layout: Layout, rank: int) -> Iterator[int]:
    """Train; yields the number of every finished step."""
    engine = Engine(job, make_mesh(layout, rank, "cpu", timedelta(minutes=5)), torch.device("cpu"))
    training = EngineTraining(engine)
    feed = build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder()).feed
    return _steps(training, _loader(job, layout, rank, feed))


def plain_steps(job: JobConfig, layout: Layout, rank: int) -> Iterator[int]:
    """Train; yields the number of every finished step."""
    replica = Replica(job, rank, layout.dp, cache_folder())
    return _steps(PlainTraining(replica), _loader(job, layout, rank, replica.feed))


def _steps(training: Training, loader: BatchLoader) -> Iterator[int]:
    for step in itertools.count(1):
        loss = training.step(loader.next())
        if step % LOG_STEPS == 0:
            dist.all_reduce(torch.tensor(float(loss)))
        yield step


def _loader(job: JobConfig, layout: Layout, rank: int, feed: Feed) -> BatchLoader:
    return BatchLoader(feed, layout=layout, dp_index=rank, start_step=0, depth=job.data.prefetch_steps)


def main(which: str, job_file: str, counter_file: str) -> None:
    """One rank; the launcher's environment says which."""
    torch.set_num_threads(1)  # as the service's workers do
    dist.init_process_group("gloo")
    job = JobConfig.model_validate_json(Path(job_file).read_text())
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = Layout(dp=world, micro_batch=job.data.global_batch // world)
    with Path(counter_file).open("r+b") as file:
        counter = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    for step in {"engine": engine_steps, "plain": plain_steps}[which](job, layout, rank):
        if rank == 0:
            counter[0] = step


if __name__ == "__main__":
    main(*sys.argv[1:])
