"""One rank of a layout on GPUs, and what it found."""

from __future__ import annotations

import gc

import numpy as np
import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import batch
from tests.support.gloo.pool import Job

Found = tuple[list[float], dict[str, np.ndarray], tuple[str, ...]]


def trained(job: Job, config: JobConfig, layout: Layout) -> Found:
    """Losses of three steps, this rank's gradients of the first, and what was applied."""
    device = torch.device("cuda", job.rank)
    torch.cuda.set_device(device)
    groups = job.groups(backend="nccl")
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, device)
    engine.initialise(config.seed)
    losses, gradients = [], {}
    for step in range(1, 4):
        losses.append(float(engine.gradients_of(batch(config, layout, 0, step))[0]))
        if step == 1:
            gradients = {entry.shard.name: entry.tensor.cpu().numpy() for entry in engine.gradients()}
        engine.optimizer_step(0.01)
    torch.cuda.synchronize()
    applied = engine.applied
    engine.close()
    groups.close()
    gc.collect()
    return losses, gradients, applied


def workspaces(job: Job) -> list[str]:
    """Symmetric memory that this process still has."""
    import torch.distributed._symmetric_memory as torchs

    return list(torchs._group_name_to_workspace_tensor)
