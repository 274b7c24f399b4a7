"""One study on a connected Ray: an experiment of Ray Tune's over a space, which a second launch resumes."""

from __future__ import annotations

import json
import time
from typing import Any

import yaml
from ray import tune
from ray.tune import Callback, Stopper
from rich.console import Console

from picotron_ray.checkpoint.storage.base import get_or_none
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.ray_cluster.placement import living_nodes, worker_needs
from picotron_ray.runtime.ray_train.result import filesystem_of
from tuning import results, searchers
from tuning.errors import InterruptedSweepError, NoneFinishedError
from tuning.objectives import Objective, front, parse_objective
from tuning.spaces import Space, with_point
from tuning.stages import RETRIES, most_at_once
from tuning.study_options import StudyOptions
from tuning.study_report import FIGURES, as_html, as_line
from tuning.trial import DRIVER_CPUS, study_trial


def device_of(job: JobConfig) -> str:
    """``cuda`` or ``cpu``: what workers get on the cluster that is connected."""
    return "cuda" if worker_needs(job.cluster, living_nodes()).gpus else "cpu"


class BudgetStopper(Stopper):
    """Ends the experiment when its wall time or its workers' hours are spent."""

    def __init__(self, options: StudyOptions) -> None:
        self._worker_s: dict[str, float] = {}
        self._most_worker_s = (options.gpu_hours or float("inf")) * 3600
        self._most_s, self._began = options.wall_s or float("inf"), time.time()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        if result.get("finished"):
            self._worker_s[trial_id] = result["wall_s"] * result["workers"]
        return False

    def stop_all(self) -> bool:
        return self.spent(sum(self._worker_s.values()))

    def spent(self, worker_s: float) -> bool:
        """Whether nothing is left, by worker seconds and by the clock since this launch."""
        return worker_s >= self._most_worker_s or time.time() - self._began >= self._most_s


class TrialLines(Callback):
    """Callback that prints a line for every trial that ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps callbacks with the experiment; a console is of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._console.print(as_line(row_of(trial)), markup=False)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._console.print(as_line(row_of(trial)), markup=False)


def row_of(trial: Any) -> dict[str, Any]:
    """A trial as plain data: its point, its figures, and what became of it."""
    figures = trial.last_result or {}
    status = results._status(trial, figures)
    return {
        "trial": trial.trial_id,
        "status": status,
        "point": dict(trial.config),
        **{name: figures.get(name) for name in FIGURES},
        "reason": results._reason(trial) if status == "failed" else "",
    }


class Study:
    """One study, from its first trial or from where it was interrupted."""

    def __init__(
        self,
        job: JobConfig,
        options: StudyOptions,
        space: Space,
        known: dict[str, Layout],
        seeds: list[dict[str, Any]],
        concurrent: int | None,
        console: Console,
    ) -> None:
        nodes = living_nodes()
        fit = most_at_once(job.cluster.max_workers, worker_needs(job.cluster, nodes), nodes)
        if not fit:
            raise ConfigError(
                f"cluster.max_workers: saw {job.cluster.max_workers}, which do not fit the cluster beside"
                f" {DRIVER_CPUS} CPU for a trial's driver; lower it or add nodes"
            )
        self._job, self._options, self._space, self._known = job, options, space, known
        self._seeds, self._console = seeds, console
        self._concurrent = min(concurrent or fit, fit)
        self._objective: Objective = parse_objective(options.objective)
        self._storage = open_storage(job.storage, options.name)
        fixed = searchers.fixed_points(space, options, seeds)
        self._points = seeds[: options.trials] if fixed is None else fixed
        self._count = options.trials if fixed is None else len(fixed)
        self._stopper = BudgetStopper(options)

    def run(self) -> dict[str, Any]:
        """All trials, then the files; returns what ``results.json`` holds.

        Raises:
            InterruptedSweepError, NoneFinishedError.
        """
        self._begin()
        self._console.print(
            f"study {self._options.name}: {self._count} trials by {self._options.search},"
            f" {self._concurrent} at once, for {', '.join(self._objective.metrics)}"
        )
        grid = self._tuner().fit()
        trials = grid._experiment_analysis.trials
        rows = sorted(map(row_of, trials), key=lambda row: str(row["trial"]))
        ended = len(rows) >= self._count and all(row["status"] != "unfinished" for row in rows)
        worker_s = sum((row["wall_s"] or 0) * (row["workers"] or 0) for row in rows)
        if not ended and not self._stopper.spent(worker_s):
            raise InterruptedSweepError(
                f"study {self._options.name}: interrupted; the same command resumes it"
            )
        return self._write(rows)

    def _begin(self) -> None:
        mine = {
            "job": public_dict(self._job),
            "options": self._options.model_dump(mode="json"),
            "space": {key: repr(axis) for key, axis in self._space.items()},
        }
        known = get_or_none(self._storage, "study.json")
        if known is None:
            self._storage.put_if_absent("study.json", json.dumps(mine, indent=1).encode())
            return
        began = json.loads(known)
        changed = [key for part in mine for key in mine[part] if began[part].get(key) != mine[part][key]]
        if changed or began["space"].keys() != mine["space"].keys():
            raise ConfigError(
                f"name: the study {self._options.name!r} began with other values of"
                f" {', '.join(changed) or 'space'}; set them back to resume it, or choose another --name"
            )
        self._console.print(f"resuming study {self._options.name}")

    def _tuner(self) -> tune.Tuner:
        filesystem, path = filesystem_of(self._job.storage)
        remote = filesystem if "://" in self._job.storage.url else None
        where = f"{path}/{self._options.name}/tune"
        shared = {
            "job": self._job.model_dump(mode="json"),
            "options": self._options.model_dump(mode="json"),
            "layouts": {name: layout.to_dict() for name, layout in self._known.items()},
            "url": f"{self._job.storage.url.rstrip('/')}/{self._options.name}/runs",
            "device": device_of(self._job),
            "reference": self._reference(),
        }
        trainable = tune.with_resources(tune.with_parameters(study_trial, study=shared), {"cpu": DRIVER_CPUS})
        if tune.Tuner.can_restore(f"{where}/trials", storage_filesystem=remote):
            return tune.Tuner.restore(f"{where}/trials", trainable, storage_filesystem=remote)
        search = searchers.searcher(self._options, self._objective, self._points, self._concurrent)
        single = len(self._objective.metrics) == 1
        asked: dict[str, Any] = {}
        if single:
            asked = {"metric": self._objective.metrics[0], "mode": self._objective.modes[0]}
        fixed = self._options.search in ("grid", "random")
        return tune.Tuner(
            trainable,
            param_space=searchers.domains(self._space),
            tune_config=tune.TuneConfig(
                **asked,
                num_samples=self._count,
                search_alg=search,
                scheduler=searchers.scheduler(self._options),
                max_concurrent_trials=None if fixed else self._concurrent,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=where,
                storage_filesystem=remote,
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                stop=self._stopper,
                callbacks=[TrialLines(self._console)],
                verbose=0,
            ),
        )

    def _reference(self) -> float:
        """Estimated tokens per second of the planner's first choice; what a score compares with."""
        profile = profile_of(device_of(self._job))
        chosen = choose_layout(self._job, self._job.cluster.max_workers, profile)
        return self._job.data.global_batch * self._job.data.sequence_length / chosen.cost_s

    def _write(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        best = front(rows, self._objective)
        if not best:
            ends = "\n".join(f"trial {row['trial']}: {row['status']}: {row['reason']}" for row in rows)
            raise NoneFinishedError(
                f"study {self._options.name}: no trial reported {', '.join(self._objective.metrics)}\n{ends}"
            )
        found = {
            "study": self._options.name,
            "kind": self._options.kind,
            "objective": list(self._objective.metrics),
            "best": best[0],
            "front": [row["trial"] for row in best],
            "trials": rows,
            "failed": sum(row["status"] == "failed" for row in rows),
            "recipe": f"{self._storage.where}/best.yaml",
            "report": f"{self._storage.where}/report.html",
        }
        recipe = public_dict(with_point(self._job, best[0]["point"], self._known))
        recipe["name"] = f"{self._job.name[:58]}-best"
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=110)
        self._storage.put("best.yaml", f"# Found by the study {self._options.name}.\n{text}".encode())
        self._storage.put("results.json", json.dumps(found, indent=1).encode())
        self._storage.put("report.html", as_html(found).encode())
        self._console.print(
            f"best of {len(rows)} trials ({found['failed']} failed): {best[0]['point']}; {found['recipe']}",
            markup=False,
        )
        return found
