"""The two stages of a sweep on a connected Ray, each an experiment of Ray Tune's that can be restored.

A stage that is done is kept as JSON and not asked of Tune again. ``sweep.json`` holds what the sweep began
with: a second launch with something else is refused, since its trials would not be comparable.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import yaml
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator, SearchAlgorithm, Searcher
from rich.console import Console

from picotron_ray.checkpoint.storage.base import get_or_none, probe
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds, living_nodes, worker_needs
from picotron_ray.runtime.ray_train.result import filesystem_of
from tuning import plan, results
from tuning.errors import InterruptedSweepError, NoneFinishedError
from tuning.plan import SweepOptions
from tuning.trial import DRIVER_CPUS, train_trial

RETRIES = 1
"""Times that Tune starts a trial again whose own actor died; its run goes on from where it was."""
LAYOUTS, RATES = "layouts", "learning-rates"


def local_cpus(job: JobConfig, concurrent: int) -> int:
    """CPU slots of a Ray of the sweep's own: that many trials, and a spare worker for each."""
    workers = (job.cluster.max_workers + 1) * job.cluster.cpus_per_worker
    return job.cluster.local_cpus or math.ceil(concurrent * (workers + DRIVER_CPUS))


def most_at_once(workers: int, needs: WorkerNeeds, nodes: list[NodeView]) -> int:
    """Number of trials of ``workers`` workers that fit at once, each with its driver on any node."""
    for count in range(sum(node.capacity(needs) for node in nodes) // workers, 0, -1):
        drivers = count * DRIVER_CPUS
        room = sum(replace(node, cpus=node.cpus - drivers).capacity(needs) for node in nodes)
        if room >= count * workers:
            return count
    return 0


class Sweep:
    """One sweep, from its first trial or from where it was interrupted."""

    def __init__(
        self,
        job: JobConfig,
        options: SweepOptions,
        concurrent: int | None,
        console: Console,
        on_cpus: list[Layout],
    ) -> None:
        """
        Args:
            concurrent: trials at once; None: as many as fit.
            on_cpus: the layouts that `check` found.
        """
        nodes = living_nodes()
        needs = worker_needs(job.cluster, nodes)
        self._job, self._options, self._console = job, options, console
        self._profile: DeviceProfile = profile_of("cuda" if needs.gpus else "cpu")
        self._layouts = on_cpus if self._profile == CPU else plan.candidates(job, options, self._profile)
        fit = most_at_once(job.cluster.max_workers, needs, nodes)
        if not fit:
            raise ConfigError(
                f"cluster.max_workers: saw {job.cluster.max_workers}, which do not fit the cluster beside"
                f" {DRIVER_CPUS} CPU for a trial's driver; lower it or add nodes"
            )
        self._concurrent = min(concurrent or fit, fit)
        self._storage = open_storage(job.storage, options.name)

    @staticmethod
    def check(job: JobConfig, options: SweepOptions) -> list[Layout]:
        """Check all trials' configs and the storage before anything is started; returns layouts for CPUs."""
        layouts = plan.candidates(job, options, CPU)
        rate = job.optimizer.learning_rate
        plan.trial_job(job, options, f"{options.name}.check", layouts[0], rate, job.storage.url)
        probe(open_storage(job.storage, options.name))
        return layouts

    def run(self) -> dict[str, Any]:
        """Both stages, then the files; returns what ``results.json`` holds."""
        layouts = self._begin()
        self._console.print(
            f"sweep {self._options.name}: {len(layouts)} layouts, then"
            f" {self._options.trials - len(layouts)} learning rates; {self._concurrent} trials at once"
        )
        space = {
            "layout": tune.grid_search([layout.to_dict() for layout in layouts]),
            "learning_rate": self._job.optimizer.learning_rate,
        }
        first = self._stage(LAYOUTS, space, len(layouts), "tokens_per_s", "max")
        best_layout = next(
            at for at in layouts if str(at) == self._best(first, "tokens_per_s", "max")["layout"]
        )
        count = self._options.trials - len(layouts)
        space = {"layout": best_layout.to_dict(), "learning_rate": self._rates(count)}
        second = self._stage(RATES, space, count, "eval_loss", "min")
        best = self._best(second, "eval_loss", "min")
        return self._write(first + second, best_layout, best)

    def _begin(self) -> list[Layout]:
        """The layouts to try; those of the first launch where the sweep is resumed."""
        found = self._layouts
        mine = {"job": public_dict(self._job), "options": self._options.model_dump(mode="json")}
        known = get_or_none(self._storage, "sweep.json")
        if known is None:
            value = {**mine, "layouts": [layout.to_dict() for layout in found]}
            self._storage.put_if_absent("sweep.json", json.dumps(value, indent=1).encode())
            return found
        began: dict[str, Any] = json.loads(known)
        changed = [key for part in mine for key in mine[part] if began[part].get(key) != mine[part][key]]
        if changed:
            raise ConfigError(
                f"name: the sweep {self._options.name!r} began with other values of {', '.join(changed)}; set"
                " them back to resume it, or choose another --name"
            )
        self._console.print(f"resuming sweep {self._options.name}")
        return [Layout.from_dict(layout) for layout in began["layouts"]]

    def _rates(self, count: int) -> Any:
        rate, factor = self._job.optimizer.learning_rate, self._options.lr_factor
        if self._options.search == "grid":
            return tune.grid_search(plan.learning_rates(self._options, self._job, count))
        return tune.loguniform(rate / factor, rate * factor)

    # --- a stage -----------------------------------------------------------------------------------------

    def _stage(
        self, name: str, space: dict[str, Any], count: int, metric: str, mode: str
    ) -> list[dict[str, Any]]:
        """Rows of a stage's trials, run or restored."""
        done = get_or_none(self._storage, f"{name}.json")
        if done is not None:
            rows: list[dict[str, Any]] = json.loads(done)
            return rows
        grid = self._tuner(name, space, count, metric, mode).fit()
        rows = results.rows_of(name, grid)
        for line in results.as_lines(rows):
            self._console.print(line, markup=False)
        if len(rows) < count or any(row["status"] == "unfinished" for row in rows):
            raise InterruptedSweepError(
                f"sweep {self._options.name}: interrupted; the same command resumes it"
            )
        self._storage.put(f"{name}.json", json.dumps(rows, indent=1).encode())
        return rows

    def _tuner(self, name: str, space: dict[str, Any], count: int, metric: str, mode: str) -> tune.Tuner:
        filesystem, path = filesystem_of(self._job.storage)
        remote = filesystem if "://" in self._job.storage.url else None
        where = f"{path}/{self._options.name}/tune"
        shared = {
            "job": self._job.model_dump(mode="json"),
            "options": self._options.model_dump(mode="json"),
            "url": f"{self._job.storage.url.rstrip('/')}/{self._options.name}/runs",
        }
        trainable = tune.with_resources(tune.with_parameters(train_trial, sweep=shared), {"cpu": DRIVER_CPUS})
        if tune.Tuner.can_restore(f"{where}/{name}", storage_filesystem=remote):
            return tune.Tuner.restore(f"{where}/{name}", trainable, storage_filesystem=remote)
        grid = name == LAYOUTS or self._options.search == "grid"
        search = self._search(name, metric, mode)
        return tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=metric,
                mode=mode,
                num_samples=1 if grid else count,
                search_alg=search,
                scheduler=self._scheduler(name),
                max_concurrent_trials=None if isinstance(search, BasicVariantGenerator) else self._concurrent,
            ),
            run_config=tune.RunConfig(
                name=name,
                storage_path=where,
                storage_filesystem=remote,
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                verbose=0,
            ),
        )

    def _search(self, name: str, metric: str, mode: str) -> Searcher | SearchAlgorithm | None:
        first = [{"learning_rate": self._job.optimizer.learning_rate}]
        if name == LAYOUTS or self._options.search == "grid":
            return None
        if self._options.search == "random":
            return BasicVariantGenerator(
                points_to_evaluate=first, random_state=self._options.seed, max_concurrent=self._concurrent
            )
        try:
            from ray.tune.search.optuna import OptunaSearch

            return OptunaSearch(metric=metric, mode=mode, points_to_evaluate=first, seed=self._options.seed)
        except (ImportError, AssertionError) as error:
            raise ConfigError("search: optuna is not installed; pip install 'picotron-ray[tune]'") from error

    def _scheduler(self, name: str) -> TrialScheduler:
        """Learning rates that fall behind are ended early; throughput needs no judge on the way."""
        steps = self._options.steps
        if name == LAYOUTS:
            return FIFOScheduler()
        return ASHAScheduler(
            time_attr="step", max_t=steps + 1, grace_period=max(1, steps // 4), reduction_factor=3
        )

    # --- the end -----------------------------------------------------------------------------------------

    def _best(self, rows: list[dict[str, Any]], metric: str, mode: str) -> dict[str, Any]:
        try:
            return dict(plan.best_row(rows, metric, mode))
        except ConfigError as error:
            raise NoneFinishedError(f"sweep {self._options.name}: no trial finished\n{error}") from error

    def _write(self, rows: list[dict[str, Any]], layout: Layout, best: dict[str, Any]) -> dict[str, Any]:
        recipe = plan.recipe(self._job, layout, best["learning_rate"], self._profile)
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=110)
        failed = sum(row["status"] == "failed" for row in rows)
        found = {
            "sweep": self._options.name,
            "best": {"layout": str(layout), "learning_rate": best["learning_rate"], "trial": best["trial"]},
            "trials": rows,
            "failed": failed,
            "recipe": f"{self._storage.where}/best.yaml",
        }
        head = f"# Found by the sweep {self._options.name}: {layout}, trial {best['trial']}.\n"
        self._storage.put("best.yaml", (head + text).encode())
        self._storage.put("results.csv", results.as_csv(rows).encode())
        self._storage.put("results.json", json.dumps(found, indent=1).encode())
        self._console.print(
            f"best of {len(rows)} trials ({failed} failed): {layout}, learning rate"
            f" {best['learning_rate']:.3g}; {found['recipe']}",
            markup=False,
        )
        return found
