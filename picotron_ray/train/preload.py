"""Imports that take time, done before a recovery would wait for them."""

from __future__ import annotations

import torch

from picotron_ray.config.job import JobConfig
from picotron_ray.train.quantised import map_of


def preload(job: JobConfig) -> None:
    """Import now what a layout of this job may need, so that no recovery waits for it."""
    if job.layout.pp != 1:
        import picotron_ray.parallel.pipeline  # noqa: F401
    if job.optimizer.moments == "8bit":
        map_of(True, torch.device("cpu"))  # torchao takes seconds to import
