"""The user's choices for a study; what contradicts itself is refused before anything is started."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.errors import ConfigError
from tuning.objectives import parse_objective
from tuning.spaces import Space, only_categories

SEARCHERS = ("grid", "random", "tpe", "cma-es", "nsga-ii")
SCHEDULERS = ("none", "asha")
POPULATION = 8
"""Trials of one generation of an evolutionary search, where the user says nothing."""


class StudyOptions(Section):
    """The user's choices for a study. A study resumes only with the options that it began with."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$", description="name of the study")
    kind: str = Field(description="layout, hparams, batch or lr")
    trials: int = Field(default=16, ge=1, description="most trials")
    steps: int = Field(default=20, ge=1, description="optimizer steps of a trial")
    search: str = Field(default="random", description="grid, random, tpe, cma-es or nsga-ii")
    scheduler: str = Field(default="none", description="none, or asha: trials that fall behind end early")
    population: int | None = Field(default=None, ge=2, description="trials of a generation, evolutionary")
    objective: str = Field(default="tokens_per_s", description="a figure, several by commas, or score")
    gpu_hours: float | None = Field(default=None, gt=0, description="worker hours that end it")
    wall_s: float | None = Field(default=None, gt=0, description="seconds that end it")
    seeded: bool = Field(default=True, description="try the planner's layouts first, in its order")
    seed: int = Field(default=0, ge=0, description="of the searcher")


def refuse_contradictions(options: StudyOptions, space: Space) -> None:
    """Refuse what cannot be searched as asked.

    Raises:
        ConfigError: one line per mistake.
    """
    wrong = []
    if options.search not in SEARCHERS:
        wrong.append(f"--search: saw {options.search!r}, expected {', '.join(SEARCHERS)}")
    if options.scheduler not in SCHEDULERS:
        wrong.append(f"--scheduler: saw {options.scheduler!r}, expected {', '.join(SCHEDULERS)}")
    if options.search == "cma-es" and only_categories(space):
        wrong.append("--search: saw cma-es on categories alone, which have no order; take tpe or nsga-ii")
    if options.population and options.population > options.trials:
        wrong.append(
            f"--population: saw {options.population}, more than the {options.trials} trials; raise --trials"
        )
    if options.population and options.search not in ("cma-es", "nsga-ii"):
        wrong.append(f"--population: saw {options.population} for {options.search}, which has none; leave it")
    needs = {"tpe": ["optuna"], "nsga-ii": ["optuna"], "cma-es": ["optuna", "cmaes"]}.get(options.search, [])
    if missing := [name for name in needs if find_spec(name) is None]:
        wrong.append(
            f"--search: saw {options.search}, which needs {missing[0]}; pip install 'picotron-ray[tune]'"
        )
    many = len(parse_objective(options.objective).metrics) > 1
    if many and (options.search == "cma-es" or options.scheduler == "asha"):
        wrong.append("--objective: saw several figures, which cma-es and asha cannot follow; take nsga-ii")
    if wrong:
        raise ConfigError(*wrong)
