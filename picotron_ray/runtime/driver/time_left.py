"""Deadline of a launch, held against the clock before anything starts."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from picotron_ray.errors import ConfigError
from picotron_ray.observability.report.page import duration

YEAR_S = 365.25 * 86_400


def check_deadline(deadline: str | None) -> None:
    """Raise ConfigError where ``cluster.deadline`` has passed, or is no time. Touches: reads the clock."""
    if deadline is None:
        return
    try:
        left_s = datetime.fromisoformat(deadline).timestamp() - time.time()
    except ValueError as error:
        raise ConfigError(f"cluster.deadline: saw {deadline!r}: {error}") from None
    if left_s <= 0:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        raise ConfigError(
            f"cluster.deadline: saw {deadline}, which passed {_span(-left_s)} ago (it is {now});"
            " expected a time to come, or null"
        )


def _span(seconds: float) -> str:
    """Say a time in units that people use, years among them.

    >>> _span(90), _span(217_932_942)
    ('1 min 30 s', '6.9 years')
    """
    return f"{seconds / YEAR_S:.1f} years" if seconds >= 2 * YEAR_S else duration(seconds)
