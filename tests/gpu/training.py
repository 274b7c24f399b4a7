"""A few steps on a CUDA device, for the tests that train there with and without something."""

from __future__ import annotations

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine, build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import batch

CUDA = torch.device("cuda", 0)


def trained(config: JobConfig, layout: Layout) -> tuple[Engine, list[float]]:
    """The engine after four steps, evaluated between them, and their losses."""
    engine = build_engine(config, layout, 0, None, CUDA)
    engine.initialise(0)
    losses = []
    for step in range(1, 5):
        losses.append(float(engine.gradients_of(batch(config, layout, 0, step))[0]))
        engine.optimizer_step(0.01)
        engine.evaluate([batch(config, layout, 0, 99)])
    torch.cuda.synchronize()
    return engine, losses
