"""One experiment of Ray Tune's over a space, on a connected Ray; a second launch restores it."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from typing import Any

from ray import tune
from rich.console import Console

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, PicotronError, StorageError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.ray_train.result import filesystem_of
from tuning import schedulers, searchers
from tuning.budget import StudyBudget
from tuning.errors import InterruptedSweepError, StudyStorageError
from tuning.live_table import LiveTable
from tuning.objectives import parse_objective
from tuning.points import fixed_points
from tuning.room import DRIVER_CPUS, device_of
from tuning.spaces import Space, with_point
from tuning.study_options import StudyOptions
from tuning.trial import study_trial
from tuning.trial_rows import ENDED, rows_of, storage_failed, trials_of
from tuning.trial_runs import GivenBack, StorageWatch, runs_url

RETRIES = 2
"""Times that Tune starts a trial again whose own actor died; its run goes on from where it was."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Space, options and job of an experiment, and where its trials go.

    Args:
        name: folder in the study's ``tune``.
        job: the job that points change.
        known: the layouts that points name.
        seeds: points to try first.
        concurrent: trials at once.
    """

    name: str
    job: JobConfig
    options: StudyOptions
    space: Space
    known: dict[str, Layout]
    seeds: list[dict[str, Any]]
    concurrent: int
    console: Console

    def rows(self) -> list[dict[str, Any]]:
        """A row per trial, run or restored; fewer than asked for only where the budget ended it.

        Raises:
            ConfigError: no point of the space is feasible.
            InterruptedSweepError: it was told to stop.
        """
        fixed = fixed_points(self.space, self.options, self.seeds, self._feasible)
        if fixed == []:
            raise ConfigError("--space: every point is infeasible; widen it")
        most = self.options.members or self.options.trials
        count, points = (most, self.seeds[:most]) if fixed is None else (len(fixed), fixed)
        self.console.print(self._headline(count), markup=False)
        tuner = self._tuner(count, points)
        grid = self._fitted(tuner)
        rows = rows_of(grid)
        ended = len(rows) >= count and all(row["status"] in ENDED for row in rows)
        if not ended and not _spent(tuner):
            raise InterruptedSweepError(
                f"study {self.options.name}: interrupted; the same command resumes it"
            )
        return rows

    def _fitted(self, tuner: tune.Tuner) -> tune.ResultGrid:
        with warnings.catch_warnings():  # Tune's advice on reusing actors is for whoever writes trainables
            warnings.filterwarnings("ignore", message="Consider boosting PBT performance")
            try:
                return tuner.fit()
            except (OSError, StudyStorageError) as error:  # of Tune's own files, or of a trial's run
                raise StorageError(
                    f"study {self.options.name}: {self.job.storage.url}: {error}; make room, then the same"
                    " command resumes it"
                ) from error
            finally:
                for callback in config_of(tuner).callbacks or ():
                    if isinstance(callback, LiveTable):
                        callback.close()

    def _headline(self, count: int) -> str:
        by = self.options.population_based or self.options.search
        return (
            f"study {self.options.name}: {count} trials by {by}, {self.concurrent} at once, for"
            f" {self.options.objective}"
        )

    def _feasible(self, point: dict[str, Any]) -> bool:
        try:
            with_point(self.job, point, self.known)
        except PicotronError:
            return False
        return True

    def _tuner(self, count: int, points: list[dict[str, Any]]) -> tune.Tuner:
        filesystem, path = filesystem_of(self.job.storage)
        remote = filesystem if "://" in self.job.storage.url else None
        where = f"{path}/{self.options.name}/tune"
        trainable = tune.with_resources(
            tune.with_parameters(study_trial, study=self._shared()), {"cpu": DRIVER_CPUS}
        )
        workers = {name: layout.world_size for name, layout in self.known.items()}
        budget = StudyBudget(self.options, workers, self.job.cluster.max_workers, self.concurrent)
        callbacks = self._callbacks(budget, count)
        if tune.Tuner.can_restore(f"{where}/{self.name}", storage_filesystem=remote):
            found = self._restored(f"{where}/{self.name}", trainable, remote)
            config = config_of(found)
            config.stop, config.callbacks = budget, callbacks
            return found
        objective = parse_objective(self.options.objective)
        asked: dict[str, Any] = {}
        if len(objective.metrics) == 1:
            asked = {"metric": objective.metrics[0], "mode": objective.modes[0]}
        drawn = self.options.search in searchers.DRAWN
        return tune.Tuner(
            trainable,
            param_space=searchers.domains(self.space),
            tune_config=tune.TuneConfig(
                **asked,
                num_samples=count,
                search_alg=searchers.searcher(self.options, objective, points, self.concurrent),
                scheduler=schedulers.scheduler(self.options, self.space, self.concurrent),
                max_concurrent_trials=None if drawn else self.concurrent,
            ),
            run_config=tune.RunConfig(
                name=self.name,
                storage_path=where,
                storage_filesystem=remote,
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                stop=budget,
                callbacks=callbacks,
                verbose=0,
            ),
        )

    def _restored(self, path: str, trainable: Any, remote: Any) -> tune.Tuner:
        """The experiment of an earlier launch; what storage made fail is to be tried again.

        Raises:
            ConfigError: this version cannot read it.
        """
        try:
            found = tune.Tuner.restore(path, trainable, storage_filesystem=remote)
        except (AttributeError, ImportError, TypeError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"name: the study {self.options.name!r} was begun by another version, whose state cannot be"
                f" read here: {error}; resume it with that version, or choose another --name"
            ) from error
        if not any(map(storage_failed, trials_of(found.get_results()))):
            return found
        return tune.Tuner.restore(path, trainable, storage_filesystem=remote, resume_errored=True)

    def _callbacks(self, budget: StudyBudget, count: int) -> list[tune.Callback]:
        metrics = parse_objective(self.options.objective).metrics
        shown = [budget, StorageWatch(), LiveTable(self.console, metrics, count)]
        keep = self.options.keep_weights or self.options.population_based
        return shown if keep else [*shown, GivenBack(self.job, self.options.name)]

    def _shared(self) -> dict[str, Any]:
        """Values that all trials share, as plain data."""
        return {
            "job": self.job.model_dump(mode="json"),
            "options": self.options.model_dump(mode="json"),
            "layouts": {name: layout.to_dict() for name, layout in self.known.items()},
            "url": runs_url(self.job, self.options.name),
            "device": device_of(self.job),
            "reference": self._reference(),
            "concurrent": self.concurrent,
        }

    def _reference(self) -> float:
        """Estimated tokens per second of the planner's first choice; what a score compares with."""
        profile = profile_of(device_of(self.job))
        chosen = choose_layout(self.job, self.job.cluster.max_workers, profile)
        return self.job.data.global_batch * self.job.data.sequence_length / chosen.cost_s


def _spent(tuner: tune.Tuner) -> bool:
    """Whether its budget ended the experiment."""
    budget = config_of(tuner).stop
    return isinstance(budget, StudyBudget) and budget.stop_all()


def config_of(tuner: tune.Tuner) -> tune.RunConfig:
    """The run config, as ``fit`` reads it."""
    assert tuner._local_tuner is not None, "the driver is no Ray client"
    return tuner._local_tuner.get_run_config()
