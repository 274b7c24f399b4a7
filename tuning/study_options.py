"""The user's choices for a study; what contradicts itself is refused before anything is started."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.errors import ConfigError, install_extra
from tuning.objectives import parse_objective
from tuning.spaces import Range, Space, only_categories

POPULATION_BASED = ("pbt", "pb2")
SEARCHERS = ("grid", "random", "tpe", "cma-es", "nsga-ii", *POPULATION_BASED)
SCHEDULERS = ("none", "asha", *POPULATION_BASED)
POPULATION = 8
"""Trials of one generation of an evolutionary search, where the user says nothing."""
NEEDS = {
    "tpe": ("optuna",), "nsga-ii": ("optuna",), "cma-es": ("optuna", "cmaes"), "pb2": ("sklearn",),
}  # fmt: skip
"""Modules of the extra ``tune`` that a search or scheduler imports."""
FIXED = ("model.", "optimizer.name", "precision", "init_from.")
"""Keys that a member of a population cannot change between two parts of its training."""


class StudyOptions(Section):
    """The user's choices for a study. A study resumes only with the options that it began with."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$", description="name of the study")
    kind: str = Field(description="layout, hparams, batch or lr")
    trials: int = Field(default=16, ge=1, description="most trials")
    steps: int = Field(default=20, ge=1, description="optimizer steps of a trial")
    search: str = Field(default="random", description="grid, random, tpe, cma-es, nsga-ii, pbt or pb2")
    scheduler: str = Field(default="none", description="none, asha, pbt or pb2")
    population: int | None = Field(default=None, ge=2, description="trials of a generation, evolutionary")
    interval: int | None = Field(default=None, ge=1, description="pbt, pb2: steps between exchanges")
    objective: str = Field(default="tokens_per_s", description="a figure, several by commas, or score")
    space: tuple[str, ...] = Field(default=(), description="axes as the user named them")
    gpu_hours: float | None = Field(default=None, gt=0, description="worker hours that end it")
    wall_s: float | None = Field(default=None, gt=0, description="seconds that end it")
    seeded: bool = Field(default=True, description="try the planner's layouts first, in its order")
    keep_weights: bool = Field(default=False, description="leave the commits of ended trials in storage")
    seed: int = Field(default=0, ge=0, description="of the searcher")

    @property
    def population_based(self) -> str:
        """``pbt`` or ``pb2``, asked for as search or as scheduler; else empty."""
        return next((name for name in POPULATION_BASED if name in (self.search, self.scheduler)), "")

    @property
    def by_speed(self) -> bool:
        """Whether no loss is judged."""
        return not {"loss", "eval_loss"} & set(self.objective.replace(" ", "").split(","))

    @property
    def members(self) -> int:
        """Trials of a population-based study, which all begin together; 0 for the others."""
        return (self.population or self.trials) if self.population_based else 0

    @property
    def exchange_steps(self) -> int:
        """Steps between two exchanges of a population-based study."""
        return self.interval or max(1, self.steps // 4)


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
    if options.population and not options.population_based and options.search not in ("cma-es", "nsga-ii"):
        wrong.append(f"--population: saw {options.population} for {options.search}, which has none; leave it")
    for name in dict.fromkeys((options.search, options.scheduler)):
        missing = [module for module in NEEDS.get(name, ()) if find_spec(module) is None]
        if missing:
            option = "--search" if name == options.search else "--scheduler"
            wrong.append(f"{option}: saw {name}, which needs {missing[0]}; {install_extra('tune')}")
    many = len(parse_objective(options.objective).metrics) > 1
    if many and (options.search == "cma-es" or options.scheduler == "asha"):
        wrong.append("--objective: saw several figures, which cma-es and asha cannot follow; take nsga-ii")
    judged_early = options.population_based or (options.scheduler if options.scheduler == "asha" else "")
    if judged_early and "wall_s" in parse_objective(options.objective).metrics:
        wrong.append(f"--objective: saw wall_s, which is known at a trial's end, too late for {judged_early}")
    wrong += _population_problems(options, space, many)
    if wrong:
        raise ConfigError(*wrong)


def _population_problems(options: StudyOptions, space: Space, many: bool) -> list[str]:
    kind, wrong = options.population_based, []
    if not kind:
        return (
            [f"--interval: saw {options.interval} without pbt or pb2; leave it"] if options.interval else []
        )
    if {options.search, options.scheduler} - {kind, "none", "random", "grid"}:
        wrong.append(
            f"--search: saw {options.search} with --scheduler {options.scheduler}; {kind} draws its own"
            " points: take one of the two"
        )
    if many:
        wrong.append(f"--objective: saw several figures, which {kind} cannot follow; take nsga-ii")
    if options.members < 2:
        wrong.append(f"--trials: saw {options.members}, expected at least 2 for a population of {kind}")
    if options.exchange_steps >= options.steps:
        wrong.append(
            f"--interval: saw {options.exchange_steps} of {options.steps} steps, so that no exchange comes"
            " before the end; raise --steps"
        )
    if kind == "pb2" and not any(isinstance(axis, Range) for axis in space.values()):
        wrong.append("--search: saw pb2 on categories alone, which have no order; take pbt")
    if fixed := [key for key in space if key.startswith(FIXED)]:
        wrong.append(f"--space: saw {fixed[0]}, which {kind} cannot change in weights half-trained; take tpe")
    return wrong
