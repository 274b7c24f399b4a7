"""Members of a population as values: trials whose training is a chain of elastic runs.

A member trains as one run until it takes over another's state. Then a run of its own begins, by
``init_from``, at the other's commit with weights and moments. Samples are drawn in another order there, and
the learning-rate schedule spans the steps that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig

ROUND = "round"
"""Figure of a member: the exchanges that it has come to, which is the time of PBT and PB2."""
NO_ROUND = -1
"""Round of a report that Tune's scheduler is to do nothing about."""


@dataclass(frozen=True, slots=True)
class MemberRun:
    """One run of a member's chain: the steps before it, and the commit that it began at.

    ``noted_step`` is its own step that the last note is about.
    """

    member: str
    run: str
    before_steps: int = 0
    origin_run: str = ""
    origin_step: int = 0
    noted_step: int = 0


def job_of_part(job: JobConfig, part: MemberRun, interval: int) -> JobConfig:
    """The run of a part: the steps that are left, with a commit and an evaluation every ``interval`` steps.

    Raises:
        ConfigError: the point does not go with fewer steps.
    """
    raw, left = job.model_dump(mode="json"), job.steps - part.before_steps
    raw |= {"name": part.run, "steps": left, "seed": job.seed + part.before_steps}
    raw["checkpoint"] |= {"interval_steps": interval, "keep_last": 2 * (job.steps // interval) + 2}
    raw["evaluate"]["interval_steps"] = interval
    schedule = raw["optimizer"]["schedule"]
    schedule["warmup_steps"] = max(0, schedule["warmup_steps"] - part.before_steps)
    schedule["decay_steps"] = min(schedule["decay_steps"], left - schedule["warmup_steps"])
    if part.origin_run:
        raw["init_from"] = {
            "run": part.origin_run, "step": part.origin_step, "url": None, "optimizer_state": True,
        }  # fmt: skip
    return parse_job(raw)
