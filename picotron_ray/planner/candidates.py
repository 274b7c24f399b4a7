"""Candidates of the search: every layout that a number of workers allows, memory and cost not looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import Degrees, fitting_degrees, layout_problems
from picotron_ray.config.validation.schedules import (
    PipelineChoice,
    asked_pp,
    least_micro_batch,
    own_schedule,
    pipelines,
    placement,
)
from picotron_ray.layout.layout import Layout, Zero
from picotron_ray.planner.model_sizes import remember_latest


def candidates(job: JobConfig, workers: int) -> Iterator[Layout]:
    """Every layout with the degrees that ``job.layout`` allows, memory not looked at."""
    for degrees in degrees_allowed(job, workers):
        for sharding in shardings(job, degrees):
            for micro_batch in micro_batches(job, degrees.dp, degrees.pp):
                for pipeline in pipelines(job, degrees.pp):
                    layout = candidate(job, degrees, sharding, micro_batch, pipeline)
                    if not layout_problems(job, layout):
                        yield layout


@remember_latest
def degrees_allowed(job: JobConfig, workers: int, above: int = 0) -> tuple[Degrees, ...]:
    """Degrees that divide model and batch, and that ``job.layout`` allows.

    They are on at most ``workers`` ranks and on more than ``above``. A plan asks twice, with the memory at
    hand and with more.
    """
    asked = asked_degrees(job)
    return tuple(
        degrees
        for degrees in fitting_degrees(job, workers, above)
        if all(want in ("auto", degree) for degree, want in zip(degrees, asked, strict=True))
    )


class Sharding(NamedTuple):
    """Part of a layout that decides how its replicas share weights and optimizer state."""

    zero: Zero
    replicate: int
    ep: int


def shardings(job: JobConfig, degrees: Degrees) -> list[Sharding]:
    """ZeRO stages, numbers of copies and expert-parallel degrees worth a look."""
    replicas = degrees.dp * degrees.cp
    return [
        Sharding(zero, copies, ep)
        for zero, copies in _shardings(job, replicas)
        for ep in expert_degrees(job, replicas)
    ]


def candidate(
    job: JobConfig,
    degrees: Degrees,
    sharding: Sharding,
    micro_batch: int,
    pipeline: PipelineChoice | None = None,
) -> Layout:
    """The layout of these choices and of the job's own; whether it fits is not looked at.

    Args:
        pipeline: one of `pipelines`; None: the first of them.
    """
    asked, way = job.layout, pipeline or pipelines(job, degrees.pp)[0]
    return Layout(
        **degrees._asdict(),
        **sharding._asdict(),
        **way._asdict(),
        placement=placement(job),
        micro_batch=micro_batch,
        context=asked.context,
        recompute="none" if asked.recompute == "auto" else asked.recompute,
        offload_activations=asked.offload_activations,
    )


def _shardings(job: JobConfig, replicas: int) -> list[tuple[Zero, int]]:
    """ZeRO stages and numbers of copies worth a look."""
    zero, copies = job.layout.zero, job.layout.replicate
    zeros: tuple[Zero, ...] = ((0, 1, 2, 3) if replicas > 1 else (0,)) if zero == "auto" else (zero,)
    divisors = [count for count in range(1, replicas) if replicas % count == 0] or [1]
    if zero == "auto" and copies not in ("auto", 1):
        zeros = zeros[1:]
    return [
        (stage, count)
        for stage in zeros
        for count in ((divisors if stage else [1]) if copies == "auto" else [copies])
    ]


def expert_degrees(job: JobConfig, replicas: int) -> list[int]:
    """Expert-parallel degrees worth a look: what the job asks for, else all that divide."""
    if job.layout.ep != "auto":
        return [job.layout.ep]
    shared = math.gcd(replicas, job.model.moe.experts) if job.model.moe.experts else 1
    return [*(ep for ep in range(1, shared) if shared % ep == 0), shared]


def asked_degrees(job: JobConfig) -> tuple[int | str, ...]:
    """Degrees that the job asks for, by the fields of ``Degrees``."""
    return tuple(asked_pp(job) if name == "pp" else getattr(job.layout, name) for name in Degrees._fields)


def micro_batches(job: JobConfig, dp: int, pp: int) -> list[int]:
    """Micro-batch sizes worth a look: the smallest that gives each count of micro-batches.

    Counts are 1, 2, 3, 4, 6, 8, 12, ... and multiples of the stages; any other size only adds fill rows. A
    schedule of the job's own fixes the count.
    """
    if job.layout.micro_batch != "auto":
        return [job.layout.micro_batch]
    if own_schedule(job) is not None:
        return [least_micro_batch(job, dp)]
    rows = math.ceil(job.data.global_batch / dp)
    counts = {rows, *(pp * factor for factor in (1, 2, 3, 4, 6, 8))}
    counts |= {base << shift for base in (1, 3) for shift in range(rows.bit_length())}
    return sorted({math.ceil(rows / count) for count in counts if count <= rows})
