"""Schedules and stages that a job allows, and what its own list of actions fixes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from picotron_ray.config.schema.compute import AUTO_SCHEDULE
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import compiled_by
from picotron_ray.layout.schedule_actions import ActionList, action_list
from picotron_ray.layout.schedules import PLAIN, SCHEDULES, schedule_of

SEARCHED_SCHEDULES = tuple(entry.name for entry in SCHEDULES.values() if entry.searched)
"""Schedules that ``layout.schedule=auto`` chooses from: of those that wait alike, those that keep least."""
SEARCHED_STAGES = (1, 2, 4, 8)
"""Stages per rank that it looks at."""


def plain_schedule(job: JobConfig) -> str:
    """The schedule by which degrees are judged: where it is left to the planner, 1f1b, which asks least."""
    return PLAIN if job.layout.schedule == AUTO_SCHEDULE else job.layout.schedule


def virtual_stages(job: JobConfig, pp: int) -> int:
    """Stages per rank: the number that the job asks for, else the fewest of its schedule."""
    if pp == 1 or job.layout.schedule == AUTO_SCHEDULE:
        return 1
    asked = job.layout.virtual_stages
    schedule = schedule_of(plain_schedule(job), job.layout.actions)
    return schedule.stages_per_rank[0] if asked == "auto" else asked


class PipelineChoice(NamedTuple):
    """A schedule, and its stages per rank."""

    schedule: str
    virtual_stages: int


def pipelines(job: JobConfig, pp: int) -> list[PipelineChoice]:
    """Schedules with their stages per rank that the job allows on so many pipeline ranks."""
    if pp == 1 or job.layout.schedule != AUTO_SCHEDULE:
        return [PipelineChoice(plain_schedule(job), virtual_stages(job, pp))]
    asked = job.layout.virtual_stages
    found = []
    for name in SEARCHED_SCHEDULES:
        least, most = SCHEDULES[name].stages_per_rank
        if SCHEDULES[name].splits_backward and _needs_whole_backward(job):
            continue
        counts = SEARCHED_STAGES if asked == "auto" else (asked,)
        found += [PipelineChoice(name, count) for count in counts if least <= count <= most]
    return [way for way in found if way.virtual_stages * pp <= job.model.depth]


def _needs_whole_backward(job: JobConfig) -> bool:
    """Whether a kernel is asked for whose backward pass cannot be split (`validation.kernels`)."""
    kernels = job.kernels
    overlaps = kernels.tp_overlap not in ("auto", "none")
    return bool(compiled_by(job)) or kernels.norm == "compiled" or overlaps


def own_schedule(job: JobConfig) -> ActionList | None:
    """The job's own list of actions; None where its schedule takes none. Raises ConfigError for a bad one."""
    return action_list(job.layout.actions) if SCHEDULES[plain_schedule(job)].with_actions else None


def asked_pp(job: JobConfig) -> int | Literal["auto"]:
    """The pipeline degree asked for; under a list of actions, which fixes it, the number of its rows."""
    own = own_schedule(job)
    return len(own.rows) if own is not None and job.layout.pp == "auto" else job.layout.pp


def placement(job: JobConfig) -> tuple[tuple[int, ...], ...]:
    """The `Layout.placement` that every layout of the job has."""
    own = own_schedule(job)
    return () if own is None else own.placement


def least_micro_batch(job: JobConfig, dp: int) -> int:
    """The smallest micro-batch to consider, in rows: 1, or as a list of actions fixes it."""
    own = own_schedule(job)
    if own is None:
        return 1
    asked = job.layout.micro_batch
    return -(-job.data.global_batch // (dp * own.micro_batches)) if asked == "auto" else asked
