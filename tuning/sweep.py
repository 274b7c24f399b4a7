"""``python -m tuning.sweep CONFIG [key=value ...]``: find a layout and a learning rate with Ray Tune.

Works by itself (a local Ray of its own), on the cluster of ``RAY_ADDRESS``, and by ``ray job submit``. The
same command again resumes an interrupted sweep: finished trials are kept, unfinished ones continue from their
runs' commits. Everything lies in ``<storage.url>/<name>``: trials' runs, Tune's own state, ``results.csv``
and ``results.json``, and ``best.yaml``, which launch takes.

Exit codes: 0 done, 2 bad config, 3 no trial of a stage finished, 4 storage unusable, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.launch import AsJson, Config, Overrides, reported
from tuning.plan import SweepOptions

QUIET = {
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


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
        lines = [f"{d['loc'][0]}: saw {d['input']!r}: {d['msg']}" for d in error.errors()]
        raise ConfigError(*lines) from None
    except ValueError:
        raise ConfigError(f"micro_batches: saw {micro_batches!r}, expected numbers as in 4,8") from None


def run(
    job: JobConfig,
    options: SweepOptions,
    concurrent: int | None,
    console: Console,
    relative_url: str = "",
) -> dict[str, Any]:
    """Connect, sweep, and disconnect; returns what ``results.json`` holds.

    Args:
        relative_url: ``storage.url`` as it was written, where that depends on the present folder; else "".

    Raises:
        ConfigError, StorageError, ClusterError: nothing was started.
        NoneFinishedError, InterruptedSweepError.
    """
    os.environ.update(QUIET)  # before Tune is imported, which reads them
    from picotron_ray.runtime.driver import launch_mark
    from picotron_ray.runtime.driver.follow_run import take_down
    from picotron_ray.runtime.driver.resolve_job import DATA, NODES, ResolvedJob, resolve
    from picotron_ray.runtime.ray_cluster import connect
    from tuning.stages import Sweep, local_cpus

    layouts = Sweep.check(job, options)
    own_ray = not os.environ.get("RAY_ADDRESS")
    resolve(ResolvedJob(job, owns_ray=True), (NODES, DATA) if own_ray else (DATA,))
    cluster = job.cluster.model_copy(update={"local_cpus": local_cpus(job, concurrent or 1)})
    with launch_mark.held(options.name):  # else `picotron-ray stop` takes its Ray for what a launch left
        local = connect.connect(job.model_copy(update={"name": options.name, "cluster": cluster}))
        # `ray job stop` sends SIGTERM, which Tune does not know; SIGUSR1 it takes for an interrupt.
        before = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        try:
            if not own_ray:
                resolve(ResolvedJob(job, relative_url=relative_url), (NODES,))
            return Sweep(job, options, concurrent, console, layouts).run()
        finally:
            signal.signal(signal.SIGTERM, before)
            take_down(local)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
