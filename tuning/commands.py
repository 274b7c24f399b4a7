"""``picotron-ray tune layout|hparams|batch|lr``, which ``python -m tuning.sweep`` takes as well.

``picotron_ray`` imports nothing of sweeps: its command line finds this group by the package's entry point.
Exit codes: 0 done, 2 bad config, 3 no trial finished, 4 storage unusable, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from picotron_ray.config.json_schema import allowed
from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.launch import Config, Overrides, reported
from picotron_ray.runtime.driver.asked_files import write_asked
from tuning import spaces
from tuning.connected import QUIET, connected
from tuning.notes import refuse_another
from tuning.points import refuse_infeasible
from tuning.study_options import (
    POPULATION,
    POPULATION_BASED,
    StudyOptions,
    refuse_contradictions,
)
from tuning.study_space import space_of

tune = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Search by trial runs."
)
KINDS = ("layout", "hparams", "batch", "lr")

Name = Annotated[str | None, typer.Option(help="of the study; default: the config's, with -KIND")]
Trials = Annotated[int, typer.Option(help="most trials")]
Members = Annotated[int, typer.Option("--trials", help="most trials; left out with pbt, pb2: the population")]
Steps = Annotated[int, typer.Option(help="optimizer steps of a trial")]
Search = Annotated[str, typer.Option(help="grid, random, tpe, cma-es, nsga-ii, pbt or pb2")]
Scheduler = Annotated[
    str, typer.Option(help="none; asha: trials that fall behind end early; pbt or pb2: they take over others")
]
Population = Annotated[int | None, typer.Option(help="trials of a generation; cma-es, nsga-ii, pbt, pb2")]
Interval = Annotated[int | None, typer.Option(help="pbt, pb2: steps between exchanges; default a quarter")]
Goal = Annotated[str, typer.Option("--objective", help="a figure, several by commas, or score")]
Hours = Annotated[float | None, typer.Option(help="worker hours after which the study ends")]
Wall = Annotated[float | None, typer.Option(help="seconds after which the study ends")]
Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--space",
        help="key=1,2 or key=1..4 or key=log:1e-4..1e-2, or micro-batch, recompute, schedule, communication,"
        " kernels, sequence-length; repeated",
    ),
]
Keep = Annotated[bool, typer.Option("--keep-weights", help="leave the commits of ended trials in storage")]
Seed = Annotated[int, typer.Option(help="of the searcher")]
Concurrent = Annotated[int | None, typer.Option(help="trials at once; default: as many as fit")]
InTurns = Annotated[int | None, typer.Option("--concurrent", help="trials at once")]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="write what results.json holds to FILE; - is stdout, alone"),
]


@tune.command()
def layout(
    config: Config,
    overrides: Overrides = None,
    name: Name = None,
    trials: Trials = 16,
    steps: Steps = 20,
    search: Search = "random",
    scheduler: Scheduler = "none",
    population: Population = None,
    interval: Interval = None,
    objective: Goal = "tokens_per_s",
    space: Axes = None,
    seeded: Annotated[bool, typer.Option(help="the planner's best layouts first")] = True,
    gpu_hours: Hours = None,
    wall_s: Wall = None,
    keep_weights: Keep = False,
    seed: Seed = 0,
    concurrent: Concurrent = None,
    json_file: JsonFile = None,
) -> None:
    """Search layouts and micro-batches, and with --space recompute, schedule, communication or kernels.

    Example: picotron-ray tune layout quickstart --trials 16 --space recompute
    """
    asked = locals()
    _run("layout", asked)


@tune.command()
def hparams(
    context: typer.Context,
    config: Config,
    overrides: Overrides = None,
    name: Name = None,
    trials: Members = 100,
    steps: Steps = 20,
    search: Search = "tpe",
    scheduler: Scheduler = "none",
    population: Population = None,
    interval: Interval = None,
    objective: Goal = "eval_loss",
    space: Axes = None,
    gpu_hours: Hours = None,
    wall_s: Wall = None,
    keep_weights: Keep = False,
    seed: Seed = 0,
    concurrent: Concurrent = None,
    json_file: JsonFile = None,
) -> None:
    """Search learning rate, batch, accumulation, warm-up, decay and sequence length, or what --space names.

    Example: picotron-ray tune hparams quickstart --space optimizer.learning_rate=log:1e-4..1e-2 --trials 12
    """
    asked = dict(locals())
    context = asked.pop("context")
    if scheduler in POPULATION_BASED and by_default(context, "search"):
        asked["search"] = scheduler
    if asked["search"] in POPULATION_BASED and by_default(context, "trials"):
        asked["trials"] = population or POPULATION
    _run("hparams", asked)


def by_default(context: typer.Context, option: str) -> bool:
    """Whether the user left an option out."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "DEFAULT"


@tune.command()
def batch(
    config: Config,
    overrides: Overrides = None,
    name: Name = None,
    steps: Steps = 10,
    concurrent: InTurns = 1,
    json_file: JsonFile = None,
) -> None:
    """Micro-batches by doubling: the fastest, and the largest that trains.

    Example: picotron-ray tune batch quickstart
    """
    asked = locals()
    _run("batch", {**asked, "trials": 16, "search": "grid", "objective": "tokens_per_s", "space": None})


@tune.command()
def lr(
    config: Config,
    overrides: Overrides = None,
    name: Name = None,
    trials: Trials = 9,
    steps: Steps = 20,
    space: Axes = None,
    concurrent: Concurrent = None,
    json_file: JsonFile = None,
) -> None:
    """Learning-rate range test: short runs at rates from 1e-6 to 1e-2, evenly in their logarithm.

    Example: picotron-ray tune lr quickstart --space optimizer.learning_rate=log:1e-4..1e-1
    """
    asked = locals()
    _run("lr", {**asked, "search": "grid", "objective": "eval_loss"})


def _run(kind: str, asked: dict[str, Any]) -> None:
    """A study from words to files; everything is refused before Ray is started."""
    json_file = asked.pop("json_file")
    alone, target = json_file == "-", Path(json_file) if json_file not in (None, "-") else None
    with reported(alone):
        from picotron_ray.runtime.driver.follow_run import without_rays_messages
        from picotron_ray.runtime.driver.resolve_job import PATHS, resolve_words
        from picotron_ray.runtime.driver.submission import current

        if target:
            _refuse_unwritable(target)
        config, overrides = asked.pop("config"), asked.pop("overrides")
        words, concurrent = asked.pop("space"), asked.pop("concurrent")
        written = resolve_words(config, overrides or [], (PATHS,), current())
        if concurrent is not None and concurrent < 1:
            raise ConfigError(f"--concurrent: saw {concurrent}, expected at least 1, or leave it out")
        asked["name"] = asked["name"] or f"{written.job.name}-{kind}"
        options = _options({**asked, "kind": kind})
        console = Console(file=sys.stderr if alone else sys.stdout, highlight=False, soft_wrap=True)
        with without_rays_messages():
            found = run(written.job, options, words or [], concurrent, console, written.relative_url)
        if alone:
            print(json.dumps(found), flush=True)
        elif target:
            write_asked("--json", target, json.dumps(found, indent=1))


def _refuse_unwritable(target: Path) -> None:
    """Find out before the trials, not after them."""
    there = target.exists()
    try:
        target.open("a").close()
    except OSError as error:
        raise ConfigError(
            f"--json: cannot write {target}: {error.strerror}; name a file that can be written"
        ) from None
    if not there:
        target.unlink()


def _options(values: dict[str, Any]) -> StudyOptions:
    try:
        return StudyOptions.model_validate(values)
    except ValidationError as error:
        raise ConfigError(*(mistake(StudyOptions, each) for each in error.errors())) from None


def mistake(options: type[Section], found: Any) -> str:
    """One line about an option that pydantic refuses."""
    key = str(found["loc"][0])
    takes = allowed(options.model_json_schema()["properties"][key])
    return f"--{key.replace('_', '-')}: saw {found['input']!r}, expected {takes}"


def run(
    job: JobConfig,
    options: StudyOptions,
    words: list[str],
    concurrent: int | None,
    console: Console,
    relative_url: str = "",
) -> dict[str, Any]:
    """Check, connect, and run or resume a study; returns what ``results.json`` holds.

    Args:
        words: the axes that the user gave, as ``--space`` takes them.
        relative_url: ``storage.url`` as it was written, where that depends on the present folder; else "".

    Raises:
        ConfigError, StorageError, ClusterError: nothing was started.
        NoneFinishedError, InterruptedSweepError.
    """
    os.environ.update(QUIET)  # before Tune is imported, which reads them
    options = options.model_copy(update={"space": tuple(words)})
    space, known, seeds = space_of(job, options, words)
    refuse_contradictions(options, space)
    short = plan_job(job, options)
    spaces.check(short, space, known)
    refuse_infeasible(space, lambda point: spaces.why_not(short, point, known), seeds)
    _storage_takes(job, options)

    from tuning.room import device_of
    from tuning.study import Study
    from tuning.trial_runs import refuse_elsewhere

    with connected(job, options.name, concurrent, relative_url, options.members):
        refuse_elsewhere(job, options.name, console)
        if device_of(job) == "cuda" != job.cluster.device:  # only the cluster knows what ``auto`` is
            space, known, seeds = space_of(job, options, words, "cuda")
        found = Study(job, options, space, known, seeds, concurrent, console).run()
    if options.kind == "batch":
        done = [row["point"]["layout.micro_batch"] for row in found["trials"] if row["status"] == "finished"]
        console.print(f"fastest {found['best']['point']['layout.micro_batch']}, largest {max(done)}")
    return found


def plan_job(job: JobConfig, options: StudyOptions) -> JobConfig:
    """The job as its trials run it, which refuses such as a warm-up longer than a trial."""
    from tuning.plan import shortened

    raw, name = job.model_dump(mode="json"), f"{options.name}.check"
    return shortened(raw, options.steps, name, job.storage.url, options.by_speed)


def _storage_takes(job: JobConfig, options: StudyOptions) -> None:
    from picotron_ray.checkpoint.storage.base import probe
    from picotron_ray.checkpoint.storage.open import open_storage

    storage = open_storage(job.storage, options.name)
    refuse_another(storage, "study", job, options)
    probe(storage)


if __name__ == "__main__":
    tune()
