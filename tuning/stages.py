"""A sweep on a connected Ray: two experiments, layouts by tokens/s and learning rates by held-out loss.

A stage that is done is kept as JSON and not asked of Tune again. ``sweep.json`` holds what the sweep began
with: a second launch with something else is refused, since its trials would not be comparable.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from picotron_ray.checkpoint.storage.base import get_or_none
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from tuning import plan, room
from tuning.experiment import Experiment
from tuning.notes import begun
from tuning.objectives import parse_objective
from tuning.plan import SweepOptions
from tuning.spaces import LAYOUT, Choice, Range, Space, with_point
from tuning.study import best_rows, put_recipe
from tuning.study_options import StudyOptions

LAYOUTS, RATES = "layouts", "learning-rates"
RATE = "optimizer.learning_rate"
FIGURES = ("step", "tokens_per_s", "loss", "eval_loss", "wall_s", "failures")
COLUMNS = ("stage", "trial", "status", "layout", "learning_rate", *FIGURES, "reason")


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
            on_cpus: the layouts for CPUs, found already.
        """
        self._job, self._options, self._console = job, options, console
        self._profile: DeviceProfile = profile_of(room.device_of(job))
        self._layouts = on_cpus if self._profile == CPU else plan.candidates(job, options, self._profile)
        self._concurrent = room.concurrency(job, concurrent)
        self._storage = open_storage(job.storage, options.name)

    def run(self) -> dict[str, Any]:
        """Both stages, then the files; returns what ``results.json`` holds."""
        layouts = self._begin()
        known = {str(layout): layout for layout in layouts}
        first = self._stage(LAYOUTS, self._job, {LAYOUT: Choice(tuple(known))}, known, len(layouts))
        best_layout = self._best(LAYOUTS, first)["point"][LAYOUT]
        count = self._options.trials - len(layouts)
        job = with_point(self._job, {LAYOUT: best_layout}, known)
        second = self._stage(RATES, job, self._rates(count), {}, count)
        best = self._best(RATES, second)
        rows = [self._flat(LAYOUTS, row, "") for row in first]
        rows += [self._flat(RATES, row, best_layout) for row in second]
        return self._write(rows, known[best_layout], rows[len(first) + second.index(best)])

    def _begin(self) -> list[Layout]:
        """The layouts to try; those of the first launch where the sweep is resumed."""
        mine = {"layouts": [layout.to_dict() for layout in self._layouts]}
        began = begun(self._storage, "sweep", self._job, self._options, mine)
        if began is None:
            return self._layouts
        self._console.print(f"resuming sweep {self._options.name}")
        return [Layout.from_dict(layout) for layout in began["layouts"]]

    def _rates(self, count: int) -> Space:
        rate, factor = self._job.optimizer.learning_rate, self._options.lr_factor
        if self._options.search == "grid":
            return {RATE: Choice(tuple(plan.learning_rates(self._options, self._job, count)))}
        return {RATE: Range(rate / factor, rate * factor, log=True)}

    def _stage(
        self, name: str, job: JobConfig, space: Space, known: dict[str, Layout], count: int
    ) -> list[dict[str, Any]]:
        """Rows of a stage's trials, run or restored."""
        done = get_or_none(self._storage, f"{name}.json")
        if done is not None:
            rows: list[dict[str, Any]] = json.loads(done)
            return rows
        searches = {"optuna": "tpe"}
        options = StudyOptions(
            name=self._options.name,
            kind="layout" if name == LAYOUTS else "lr",
            trials=count,
            steps=self._options.steps,
            search="grid" if name == LAYOUTS else searches.get(self._options.search, self._options.search),
            scheduler="none" if name == LAYOUTS else "asha",
            objective="tokens_per_s" if name == LAYOUTS else "eval_loss",
            seed=self._options.seed,
        )
        own = [] if name == LAYOUTS else [{RATE: self._job.optimizer.learning_rate}]
        rows = Experiment(name, job, options, space, known, own, self._concurrent, self._console).rows()
        self._storage.put(f"{name}.json", json.dumps(rows, indent=1).encode())
        return rows

    # --- the end -----------------------------------------------------------------------------------------

    def _best(self, stage: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        figure = "tokens_per_s" if stage == LAYOUTS else "eval_loss"
        best = best_rows(f"sweep {self._options.name}", rows, parse_objective(figure))[0]
        return next(row for row in rows if row["trial"] == best["trial"])

    def _flat(self, stage: str, row: dict[str, Any], layout: str) -> dict[str, Any]:
        """A row of ``results.csv``."""
        return {
            "stage": stage,
            "trial": row["trial"],
            "status": row["status"],
            "layout": row["point"].get(LAYOUT, layout),
            "learning_rate": row["point"].get(RATE, self._job.optimizer.learning_rate),
            **{name: row[name] for name in (*FIGURES, "reason")},
        }

    def _write(self, rows: list[dict[str, Any]], layout: Layout, best: dict[str, Any]) -> dict[str, Any]:
        job = with_point(self._job, {RATE: best["learning_rate"]}, {})
        failed = sum(row["status"] == "failed" for row in rows)
        found = {
            "sweep": self._options.name,
            "best": {"layout": str(layout), "learning_rate": best["learning_rate"], "trial": best["trial"]},
            "trials": rows,
            "failed": failed,
            "recipe": f"{self._storage.where}/best.yaml",
        }
        head = f"Found by the sweep {self._options.name}: {layout}, trial {best['trial']}."
        put_recipe(self._storage, head, plan.recipe(job, layout, self._profile))
        self._storage.put("results.csv", as_csv(rows).encode())
        self._storage.put("results.json", json.dumps(found, indent=1).encode())
        self._console.print(
            f"best of {len(rows)} trials ({failed} failed): {layout}, learning rate"
            f" {best['learning_rate']:.3g}; {found['recipe']}",
            markup=False,
        )
        return found


def as_csv(rows: Iterable[dict[str, Any]]) -> str:
    """All columns, a row per trial."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
