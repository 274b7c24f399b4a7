"""``python -m tuning.sweep CONFIG [key=value ...]``: find a layout and a learning rate with Ray Tune.

``python -m tuning.sweep layout|hparams|batch|lr CONFIG`` is ``picotron-ray tune`` (``tuning.commands``).

Works by itself (a local Ray of its own), on the cluster of ``RAY_ADDRESS``, and by ``ray job submit``. The
same command again resumes an interrupted sweep: finished trials are kept, unfinished ones continue from their
runs' commits. Everything lies in ``<storage.url>/<name>``: trials' runs, Tune's own state, ``results.csv``
and ``results.json``, and ``best.yaml``, which launch takes.

Exit codes: 0 done, 2 bad config, 3 no trial of a stage finished, 4 storage unusable, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.launch import AsJson, Config, Overrides, reported
from tuning import plan
from tuning.commands import mistake
from tuning.connected import QUIET, connected
from tuning.notes import refuse_another
from tuning.plan import SweepOptions


def main(
    config: Config,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="of the sweep; default: the config's, with -sweep")] = None,
    trials: Annotated[int, typer.Option(help="in both stages together")] = 8,
    layout_trials: Annotated[int | None, typer.Option(help="of them for layouts; default: half")] = None,
    steps: Annotated[int, typer.Option(help="optimizer steps of a trial")] = 20,
    micro_batches: Annotated[str, typer.Option(help="to try, as in 4,8; default: the planner's")] = "",
    search: Annotated[str, typer.Option(help="of learning rates: random, grid or optuna")] = "random",
    lr_factor: Annotated[float, typer.Option(help="rates from the job's / this to its x this")] = 10.0,
    seed: Annotated[int, typer.Option(help="draws the learning rates")] = 0,
    concurrent: Annotated[int | None, typer.Option(help="trials at once; default: as many as fit")] = None,
    as_json: AsJson = False,
) -> None:
    """Sweep layouts and micro-batches by tokens/s, then learning rates by held-out loss.

    Example: python -m tuning.sweep quickstart --trials 6 --micro-batches 4,8
    """
    with reported(as_json):
        from picotron_ray.runtime.driver.follow_run import without_rays_messages
        from picotron_ray.runtime.driver.resolve_job import PATHS, resolve_words
        from picotron_ray.runtime.driver.submission import current

        asked = resolve_words(config, overrides or [], (PATHS,), current())
        job = asked.job
        options = _options(
            name=name or f"{job.name}-sweep",
            trials=trials,
            layout_trials=layout_trials,
            steps=steps,
            micro_batches=micro_batches,
            search=search,
            lr_factor=lr_factor,
            seed=seed,
        )
        console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, soft_wrap=True)
        with without_rays_messages():
            found = run(job, options, concurrent, console, asked.relative_url)
        if as_json:
            print(json.dumps(found), flush=True)


def _options(micro_batches: str, **values: Any) -> SweepOptions:
    try:
        sizes = tuple(int(size) for size in micro_batches.split(",") if size.strip())
        return SweepOptions(micro_batches=sizes, **values)
    except ValidationError as error:
        raise ConfigError(*(mistake(SweepOptions, each) for each in error.errors())) from None
    except ValueError:
        raise ConfigError(f"--micro-batches: saw {micro_batches!r}, expected numbers as in 4,8") from None


def run(
    job: JobConfig,
    options: SweepOptions,
    concurrent: int | None,
    console: Console,
    relative_url: str = "",
) -> dict[str, Any]:
    """Check, connect, sweep, and disconnect; returns what ``results.json`` holds.

    Args:
        relative_url: ``storage.url`` as it was written, where that depends on the present folder; else "".

    Raises:
        ConfigError, StorageError, ClusterError: nothing was started.
        NoneFinishedError, InterruptedSweepError.
    """
    from picotron_ray.checkpoint.storage.base import probe
    from picotron_ray.checkpoint.storage.open import open_storage
    from picotron_ray.planner.device_profile import CPU

    os.environ.update(QUIET)  # before Tune is imported, which reads them
    layouts = plan.candidates(job, options, CPU)
    plan.shortened(job.model_dump(mode="json"), options.steps, f"{options.name}.check", job.storage.url)
    storage = open_storage(job.storage, options.name)
    refuse_another(storage, "sweep", job, options)
    probe(storage)

    from tuning.stages import Sweep
    from tuning.trial_runs import refuse_elsewhere

    with connected(job, options.name, concurrent, relative_url):
        refuse_elsewhere(job, options.name, console)
        return Sweep(job, options, concurrent, console, layouts).run()


if __name__ == "__main__":
    from tuning.commands import KINDS, tune

    if sys.argv[1:2] and sys.argv[1] in KINDS:
        tune(prog_name="python -m tuning.sweep")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
