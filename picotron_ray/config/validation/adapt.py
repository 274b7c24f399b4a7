"""Rules between keys of ``adapt`` and others."""

from __future__ import annotations

from collections.abc import Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig


def _measured(job: JobConfig) -> Iterator[Problem]:
    if job.adapt.apply and job.telemetry.interval_s is None:
        text = (
            f"saw {', '.join(job.adapt.apply)} with telemetry.interval_s=null, so that nothing is measured;"
        )
        yield Problem("adapt.apply", f"{text} give an interval, or drop it", ("telemetry.interval_s",))


def _twice(job: JobConfig) -> Iterator[Problem]:
    kinds = job.adapt.apply
    if len(set(kinds)) < len(kinds):
        yield Problem("adapt.apply", f"saw {', '.join(kinds)}; name each kind once")


def _lossy(job: JobConfig) -> Iterator[Problem]:
    """Refuse permission for what this precision cannot do."""
    kinds, precision = job.adapt.apply, job.precision
    if "compression" in kinds and precision == "fp64":
        text = "saw compression with precision=fp64, which is for exact sums; drop it"
        yield Problem("adapt.apply", text, ("precision",))
    if "precision" in kinds and precision not in ("fp32", "tf32"):
        text = f"saw precision with precision={precision}: only fp32 and tf32 can give way to bf16; drop it"
        yield Problem("adapt.apply", text, ("precision",))


RULES = (_measured, _twice, _lossy)
"""A list of rules, each from a job to its problems."""
