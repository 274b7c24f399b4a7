"""Numbers of workers that a job's layout keys allow: memory and cost are not looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.planner.candidates import asked_degrees, degrees_allowed

MOST_TRIED = 16
"""Sizes below, and above, that are looked at for some that do."""
MOST_NAMED = 3
"""Of them, sizes that are named."""


def size_problem(job: JobConfig, workers: int) -> str:
    """Say why no layout uses exactly so many workers, and which numbers would do; "": one does.

    >>> from picotron_ray.config.load import parse_job
    >>> job = parse_job({"layout": {"tp": 2, "pp": 2}, "cluster": {"max_workers": 4}})
    >>> size_problem(job, 4)
    ''
    >>> size_problem(job, 6)
    'no layout with tp=2 pp=2 uses exactly 6; 4, 8 or 12 workers would do'
    """
    if _allowed(job, workers):
        return ""
    named = zip(("dp", "tp", "pp", "cp"), asked_degrees(job), strict=True)
    fixed = [f"{axis}={degree}" for axis, degree in named if degree != "auto" and (axis, degree) != ("cp", 1)]
    keys = " ".join(fixed) or f"auto degrees and data.global_batch={job.data.global_batch}"
    sizes = [str(size) for size in _near(job, workers)]
    said = " or ".join(filter(None, (", ".join(sizes[:-1]), *sizes[-1:])))
    would = f"{said} workers would do" if said else "no number of workers near that would do"
    return f"no layout with {keys} uses exactly {workers}; {would}"


def _allowed(job: JobConfig, workers: int) -> bool:
    return bool(degrees_allowed(job, workers, workers - 1))


def _near(job: JobConfig, workers: int) -> list[int]:
    """The nearest sizes that are allowed, in order."""
    unit = math.prod(degree for degree in asked_degrees(job) if isinstance(degree, int))
    at = workers // unit * unit
    below = _first(job, range(at, 0, -unit))
    above = _first(job, range(at + unit, at + (MOST_TRIED + 1) * unit, unit))
    near = sorted([*below, *above], key=lambda size: (abs(size - workers), size))
    return sorted(near[:MOST_NAMED])


def _first(job: JobConfig, sizes: Iterable[int]) -> Iterator[int]:
    return islice((size for size in islice(sizes, MOST_TRIED) if _allowed(job, size)), MOST_NAMED)
