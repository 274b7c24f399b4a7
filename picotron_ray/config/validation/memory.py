"""Rules between keys of ``memory`` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.memory import memory_problems, strategy_problems


def _memory(job: JobConfig) -> Iterator[Problem]:
    for key, text in memory_problems(job, job.cluster.device).items():  # auto: once machines are known
        yield Problem(key, text, ("cluster.device",))
    yield from strategy_problems(job)


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_memory,)
