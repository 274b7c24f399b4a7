"""Deadline of a launch, held against the clock before anything starts."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.observability.report.page import duration

YEAR_S = 365.25 * 86_400


class HasJob(Protocol):
    """Value that a step takes and returns."""

    @property
    def job(self) -> JobConfig: ...


At = TypeVar("At", bound=HasJob)


def with_time_left(at: At) -> At:
    """Raise ConfigError where ``cluster.deadline`` has passed. Touches: reads the clock."""
    cluster = at.job.cluster
    if cluster.deadline is None:
        return at
    try:
        left_s = datetime.fromisoformat(cluster.deadline).timestamp() - time.time()
    except ValueError as error:
        raise ConfigError(f"cluster.deadline: saw {cluster.deadline!r}: {error}") from None
    if left_s <= 0:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        raise ConfigError(
            f"cluster.deadline: saw {cluster.deadline}, which passed {_span(-left_s)} ago (it is {now});"
            " expected a time to come, or null"
        )
    return at


def _span(seconds: float) -> str:
    """Say a time in units that people use, years among them.

    >>> _span(90), _span(217_932_942)
    ('1 min 30 s', '6.9 years')
    """
    return f"{seconds / YEAR_S:.1f} years" if seconds >= 2 * YEAR_S else duration(seconds)
