"""Held-out sets of a job beside the part of its data, and the figures that evaluation makes of them."""

from __future__ import annotations

import math

from picotron_ray.config.schema.job import JobConfig

MOST_SETS = 32
"""Held-out sets beside the part of the data; a worker's page has room for so many losses."""
EVAL_LOSS = "eval_loss"


def set_names(job: JobConfig) -> tuple[str, ...]:
    """Names of the held-out sets in the order of their losses: `evaluate.sets`, then sources of a mixture."""
    sources = job.data.sources if job.evaluate.source_samples else ()
    return (*(one.name for one in job.evaluate.sets), *(source.name for source in sources))


def figure_of(name: str) -> str:
    """Name of a set's loss among the figures of an evaluation."""
    return f"{EVAL_LOSS}/{name}"


def figures(job: JobConfig) -> tuple[str, ...]:
    """Names of all figures of an evaluation."""
    return (EVAL_LOSS, *map(figure_of, set_names(job)))


def judged_interval(job: JobConfig) -> int:
    """Steps between commits whose own step is evaluated too."""
    return math.lcm(job.checkpoint.interval_steps, job.evaluate.interval_steps)


def judges_commit(job: JobConfig, step: int) -> bool:
    """Whether the evaluation of a step belongs to its commit, so that it must come before the snapshot."""
    return job.checkpoint.keep_best is not None and step % judged_interval(job) == 0
