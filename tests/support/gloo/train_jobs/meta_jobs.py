"""Generations that learn from tasks, with deaths inside an inner step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec, Outcome
from picotron_ray.train.meta.strategies import Learner
from tests.support.gloo.pool import Job
from tests.support.gloo.train_jobs.remesh_jobs import generation, resources_of

INNER = "inner"
"""A phase that is none: within the inner steps of a task."""


def task_generation(
    job: Job,
    config: JobConfig,
    spec: GenerationSpec,
    folder: str,
    kill: tuple[int, int, str],
    told: str,
    kind: str = "cpu",
) -> Outcome:
    """As `generation`, but a rank that is killed in phase ``inner`` dies in the second inner step."""
    rank, first, wanted = kill
    if wanted != INNER:
        return generation(job, config, spec, folder, kill, told, kind)
    home, plain = resources_of(config, Path(folder), kind), Learner.loss
    calls = [0]

    def loss(learner: Learner, *args: Any) -> Any:
        if job.rank == rank and home.page.computing_step >= first:
            calls[0] += 1
            if calls[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return plain(learner, *args)

    patched: Callable[..., Any] = loss
    with patch.object(Learner, "loss", patched):
        return generation(job, config, spec, folder, (-1, 0, ""), told, kind)
