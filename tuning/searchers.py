"""Searchers of a study, as Ray Tune's."""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune.search import BasicVariantGenerator, SearchAlgorithm, Searcher

from picotron_ray.errors import ConfigError, install_extra
from tuning.objectives import Objective
from tuning.spaces import Choice, Range, Space
from tuning.study_options import POPULATION, POPULATION_BASED, StudyOptions

DRAWN = ("grid", "random", *POPULATION_BASED)
"""Searches whose points no trial's figures change."""
INSTALL = install_extra("tune")


def domains(space: Space) -> dict[str, Any]:
    """The space as Ray Tune's."""
    return {key: domain(axis) for key, axis in space.items()}


def domain(axis: Choice | Range) -> Any:
    """An axis as Ray Tune's."""
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
    if options.search in DRAWN:
        return BasicVariantGenerator(
            points_to_evaluate=points,
            random_state=options.seed,
            max_concurrent=0 if options.population_based else concurrent,  # a paused member counts as live
        )
    try:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)

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
