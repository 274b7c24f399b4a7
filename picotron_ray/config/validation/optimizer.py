"""Rules of what the optimizer does by name of a parameter, and of what it keeps beside the moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.parameter_groups import trained_names, useless_patterns


def _groups(job: JobConfig) -> Iterator[Problem]:
    """Refuse groups without a parameter, and groups that change nothing."""
    for index, group in enumerate(job.optimizer.groups):
        if group.rate_factor == 1.0 and group.weight_decay is None:
            text = (
                "saw neither rate_factor nor weight_decay, a group that changes nothing; say one, or drop it"
            )
            yield Problem(f"optimizer.groups.{index}", text)
    names = trained_names(job.model) if job.optimizer.groups else None
    if names is None:  # of a model of one's own: judged again once launch has looked into it
        return
    for index, nearest, taken in useless_patterns(job.optimizer, names):
        pattern = job.optimizer.groups[index].pattern
        if taken:
            text = (
                f"saw {pattern}, all of whose parameters go to {taken} before it (the first match counts);"
                " put it first, or drop it"
            )
        else:
            text = f"saw {pattern}, which matches no trained parameter; the nearest is {nearest}"
        yield Problem(f"optimizer.groups.{index}.pattern", text, ("model",))


def _average(job: JobConfig) -> Iterator[Problem]:
    if job.evaluate.weights == "ema" and job.optimizer.ema_decay is None:
        text = "saw ema with optimizer.ema_decay=null, which keeps none; say a decay (0.999), or use trained"
        yield Problem("evaluate.weights", text, ("optimizer.ema_decay",))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_groups, _average)
