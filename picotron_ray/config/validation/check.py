"""Rules between keys: mistakes that no value shows alone.

A rule yields problems and never raises, so that all mistakes of a config are reported at once. ``touches``
names the keys that a rule looked at. Where one of them already failed on its own, the rule's problem is not
reported, because it would speak about a default and not about what the user wrote.
"""

from __future__ import annotations

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import possible
from picotron_ray.config.validation import (
    adapt,
    alerts,
    comm,
    compute,
    curriculum,
    data,
    documents,
    evaluate,
    fp8,
    kernels,
    memory,
    meta,
    model,
    optimizer,
    service,
    telemetry,
)

RULES = (
    *adapt.RULES,
    *model.RULES,
    *data.RULES,
    *documents.RULES,
    *curriculum.RULES,
    *meta.RULES,
    *compute.RULES,
    *fp8.RULES,
    *optimizer.RULES,
    *comm.RULES,
    *kernels.RULES,
    *memory.RULES,
    *service.RULES,
    *evaluate.RULES,
    *alerts.RULES,
    *telemetry.RULES,
)


def check(job: JobConfig) -> list[Problem]:
    """Every broken rule of a config whose values are each valid.

    Under ``precision: auto`` only problems of every possible precision count. Launch checks again once it is
    known.
    """
    best, *others = ([problem for rule in RULES for problem in rule(each)] for each in possible(job))
    keys = [{problem.key for problem in found} for found in others]
    return [problem for problem in best if all(problem.key in found for found in keys)]
