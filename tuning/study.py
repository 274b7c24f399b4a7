"""One study on a connected Ray, from its first trial or from where it was interrupted."""

from __future__ import annotations

import json
from typing import Any

import yaml
from rich.console import Console

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.search import choose_layout
from tuning import plan, room
from tuning.errors import NoneFinishedError
from tuning.experiment import Experiment
from tuning.notes import begun
from tuning.objectives import Objective, front, parse_objective
from tuning.spaces import LAYOUT, Space, with_point
from tuning.study_options import StudyOptions
from tuning.study_report import as_html


class Study:
    """One study: an experiment over a space, then the files that it leaves."""

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
        at_once = room.concurrency(job, concurrent, options.members)
        self._job, self._options, self._known, self._console = job, options, known, console
        self._experiment = Experiment("trials", job, options, space, known, seeds, at_once, console)
        self._storage = open_storage(job.storage, options.name)

    def run(self) -> dict[str, Any]:
        """All trials, then the files; returns what ``results.json`` holds.

        Raises:
            InterruptedSweepError, NoneFinishedError.
        """
        space = {key: repr(axis) for key, axis in self._experiment.space.items()}
        if begun(self._storage, "study", self._job, self._options, {"space": space}) is not None:
            self._console.print(f"resuming study {self._options.name}")
        return self._write(self._experiment.rows())

    def _write(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        objective = parse_objective(self._options.objective)
        best = best_rows(f"study {self._options.name}", rows, objective)
        found = {
            "study": self._options.name,
            "kind": self._options.kind,
            "objective": list(objective.metrics),
            "best": best[0],
            "front": [row["trial"] for row in best],
            "trials": rows,
            "failed": sum(row["status"] == "failed" for row in rows),
            "recipe": f"{self._storage.where}/best.yaml",
            "report": f"{self._storage.where}/report.html",
        }
        head = f"Found by the study {self._options.name}: trial {best[0]['trial']}."
        put_recipe(self._storage, head, self._recipe(best[0]["point"]))
        self._storage.put("results.json", json.dumps(found, indent=1).encode())
        self._storage.put("report.html", as_html(found).encode())
        self._console.print(
            f"best of {len(rows)} trials ({found['failed']} failed): {best[0]['point']}; {found['recipe']}",
            markup=False,
        )
        return found

    def _recipe(self, point: dict[str, Any]) -> dict[str, Any]:
        """The job with the point, of a name of its own."""
        found = with_point(self._job, point, self._known)
        if LAYOUT in point:
            profile = profile_of(room.device_of(self._job))
            layout = choose_layout(found, found.cluster.max_workers, profile).layout
            rest = {key: value for key, value in point.items() if key != LAYOUT}
            return plan.recipe(with_point(self._job, rest, self._known), layout, profile)
        return {**public_dict(found), "name": f"{self._job.name[:58]}-best"}


def best_rows(what: str, rows: list[dict[str, Any]], objective: Objective) -> list[dict[str, Any]]:
    """The front of the finished trials, best in the first figure first.

    Raises:
        NoneFinishedError: there is none; one line with the commonest reason.
    """
    best = front(rows, objective)
    if best:
        return [dict(row) for row in best]
    reasons = [row["reason"] or row["status"] for row in rows]
    commonest = max(reasons, key=reasons.count, default="no trial was run")
    raise NoneFinishedError(
        f"{what}: no trial reported {', '.join(objective.metrics)}; {reasons.count(commonest)} of"
        f" {len(rows)} trials: {commonest}"
    )


def put_recipe(storage: Storage, head: str, recipe: dict[str, Any]) -> None:
    """Write ``best.yaml``, which launch takes."""
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=110)
    storage.put("best.yaml", f"# {head}\n{text}".encode())
