"""Searchers and schedulers of a study, as Ray Tune's."""

from __future__ import annotations

import itertools
import random
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator, SearchAlgorithm, Searcher

from picotron_ray.errors import ConfigError
from tuning.objectives import Objective
from tuning.spaces import Choice, Range, Space, only_categories
from tuning.study_options import POPULATION, StudyOptions

INSTALL = "pip install 'picotron-ray[tune]'"


def fixed_points(
    space: Space, options: StudyOptions, seeds: list[dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """The points of a search that is decided beforehand; None where trials decide it, or numbers are drawn.

    A grid is in the axes' order, the last axis fastest. A random search of categories alone never draws a
    point twice; the seeds come first.
    """
    if options.search == "grid":
        return _grid(space, options.trials)[: options.trials]
    if options.search != "random" or not only_categories(space):
        return None
    points = _grid(space, 0)
    random.Random(options.seed).shuffle(points)
    return [*seeds, *(point for point in points if point not in seeds)][: options.trials]


def _grid(space: Space, trials: int) -> list[dict[str, Any]]:
    """All points; a range gives as many values as let the whole grid fit the trials, at least 2."""
    ranges = sum(isinstance(axis, Range) for axis in space.values())
    choices = 1
    for axis in space.values():
        choices *= len(axis.values) if isinstance(axis, Choice) else 1
    each = max(2, int((trials / choices) ** (1 / ranges) + 1e-9)) if ranges else 0
    columns = [axis.values if isinstance(axis, Choice) else axis.grid(each) for axis in space.values()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*columns)]


def domains(space: Space) -> dict[str, Any]:
    """The space as Ray Tune's."""
    return {key: _domain(axis) for key, axis in space.items()}


def _domain(axis: Choice | Range) -> Any:
    if isinstance(axis, Choice):
        return tune.choice(list(axis.values))
    if axis.whole:
        draw = tune.lograndint if axis.log else tune.randint
        return draw(int(axis.low), int(axis.high) + 1)
    return (tune.loguniform if axis.log else tune.uniform)(axis.low, axis.high)


def searcher(
    options: StudyOptions,
    objective: Objective,
    points: list[dict[str, Any]],
    concurrent: int,
) -> Searcher | SearchAlgorithm:
    """Ray Tune's search algorithm for the options.

    Args:
        points: to try first.

    Raises:
        ConfigError: a package is missing; names the extra.
    """
    if options.search in ("grid", "random"):
        return BasicVariantGenerator(
            points_to_evaluate=points, random_state=options.seed, max_concurrent=concurrent
        )
    try:
        from ray.tune.search.optuna import OptunaSearch

        single = len(objective.metrics) == 1
        return OptunaSearch(
            metric=objective.metrics[0] if single else list(objective.metrics),
            mode=objective.modes[0] if single else list(objective.modes),
            points_to_evaluate=points,
            sampler=sampler(options),
        )
    except (ImportError, AssertionError) as error:
        raise ConfigError(f"--search: saw {options.search}, which needs optuna; {INSTALL}") from error


def sampler(options: StudyOptions) -> Any:
    """Optuna's sampler of a search.

    Raises:
        ImportError: optuna, or for cma-es cmaes, is not installed.
    """
    from optuna import samplers

    if options.search == "tpe":
        return samplers.TPESampler(seed=options.seed)
    population = options.population or min(POPULATION, max(2, options.trials))
    if options.search == "nsga-ii":
        return samplers.NSGAIISampler(population_size=population, seed=options.seed)
    import cmaes  # noqa: F401  optuna asks for it only at the second generation

    return samplers.CmaEsSampler(seed=options.seed, popsize=population, warn_independent_sampling=False)


def scheduler(options: StudyOptions) -> TrialScheduler:
    """Ray Tune's scheduler: what may end a trial before its last step."""
    if options.scheduler == "none":
        return FIFOScheduler()
    steps = options.steps
    return ASHAScheduler(
        time_attr="step", max_t=steps + 1, grace_period=max(1, steps // 4), reduction_factor=3
    )
