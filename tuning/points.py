"""Points of a space without trials' help: grids, random draws, and values brought back into their axes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

from picotron_ray.errors import ConfigError
from tuning.spaces import Choice, Range, Space, only_categories
from tuning.study_options import StudyOptions

TRIED = 300
"""Points that are looked at, at most, before a space counts as infeasible."""
MOST_DRAWN = 100_000
"""Points that a random search looks at, at most, until it has as many feasible ones as trials."""


def fixed_points(
    space: Space,
    options: StudyOptions,
    seeds: list[dict[str, Any]],
    feasible: Callable[[dict[str, Any]], bool],
) -> list[dict[str, Any]] | None:
    """The points of a search that is decided beforehand; None where trials decide it, or numbers are drawn.

    A grid is in the axes' order, the last axis fastest. A random search of categories alone never draws a
    point twice; the seeds come first. Points that are not feasible are left out.
    """
    if options.search == "grid":
        columns = _grid(space, options.members or options.trials)
        order: Iterable[int] = range(math.prod(map(len, columns)))
        seeds = []
    elif options.search == "random" and only_categories(space) and not options.population_based:
        columns = [axis.values for axis in space.values() if isinstance(axis, Choice)]
        total = math.prod(map(len, columns))
        order = random.Random(options.seed).sample(range(total), min(total, MOST_DRAWN))
    else:
        return None
    drawn = (dict(zip(space, _point(columns, place), strict=True)) for place in order)
    points = itertools.chain(seeds, (point for point in drawn if point not in seeds and feasible(point)))
    return list(itertools.islice(points, options.members or options.trials))


def refuse_infeasible(
    space: Space, why_not: Callable[[dict[str, Any]], str], seeds: list[dict[str, Any]]
) -> None:
    """Refuse a space of which no point is feasible: of many points, of which none that is tried is.

    Raises:
        ConfigError: names the commonest reason.
    """
    columns = _grid(space, 2 * TRIED)
    total = math.prod(map(len, columns))
    drawn = random.Random(0).sample(range(total), min(total, TRIED))
    points = itertools.chain(seeds, (dict(zip(space, _point(columns, at), strict=True)) for at in drawn))
    reasons = []
    for point in points:
        reason = why_not(point)
        if not reason:
            return
        reasons.append(reason.splitlines()[0])
    commonest = max(reasons, key=reasons.count)
    of = f"every point is infeasible, {len(reasons)} tried" if total > TRIED else "every point is infeasible"
    raise ConfigError(f"--space: {of}: {commonest}")


def _grid(space: Space, trials: int) -> list[tuple[Any, ...]]:
    """Values per axis; a range gives as many as let the whole grid fit the trials, at least 2."""
    ranges = sum(isinstance(axis, Range) for axis in space.values())
    choices = math.prod(len(axis.values) for axis in space.values() if isinstance(axis, Choice))
    each = max(2, int((trials / choices) ** (1 / ranges) + 1e-9)) if ranges else 0
    return [axis.values if isinstance(axis, Choice) else axis.grid(each) for axis in space.values()]


def _point(columns: list[tuple[Any, ...]], place: int) -> list[Any]:
    """Values of the point at a place of the grid, the last axis fastest."""
    values = []
    for column in reversed(columns):
        place, at = divmod(place, len(column))
        values.append(column[at])
    return values[::-1]


class Explored:
    """Explored values brought back into their axes: PBT multiplies by 0.8 and 1.2 without limits."""

    def __init__(self, space: Space) -> None:
        self._ranges = {key: axis for key, axis in space.items() if isinstance(axis, Range)}

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        for key, axis in self._ranges.items():
            value = min(axis.high, max(axis.low, float(config[key])))
            config[key] = round(value) if axis.whole else value
        return config
