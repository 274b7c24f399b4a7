"""One trial: a run of its own name, driven by a thin actor of Ray Tune's.

The actor reserves ``DRIVER_CPUS`` and computes nothing; the run's workers reserve their own resources, on any
node, and may be lost and replaced without the trial's knowing. A trial whose actor was killed is started
again by Tune and resumes its run. A run that failed for good raises, here and when Tune starts it again: an
out-of-memory error ends that trial, with its reason, and no other.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ray import tune
from ray.train.v2.api.config import RunConfig
from ray.train.v2.api.exceptions import ControllerError

from picotron_ray.checkpoint.storage.base import decode_json, get_or_none
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import StorageError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.ray_train.trainer import ElasticTrainer
from tuning import trial_runs
from tuning.errors import StudyStorageError, TrialFailedError
from tuning.objectives import parse_objective, score
from tuning.parts import MemberRun, job_of_part
from tuning.plan import shortened
from tuning.population import present_part, slot
from tuning.spaces import with_point
from tuning.study_options import StudyOptions
from tuning.trial_reports import MemberReports, TrialReports, finite


def run_name(options: StudyOptions) -> str:
    """The name of the calling trial's run: the same whenever Tune starts the trial again."""
    return trial_runs.run_name(options.name, tune.get_context().get_trial_id())


def study_trial(config: dict[str, Any], study: dict[str, Any]) -> None:
    """Train one trial of a study: Tune's trainable.

    Args:
        config: the trial's point.
        study: what all trials share: ``job``, ``options``, ``layouts``, ``url``, ``device``, ``concurrent``
            and ``reference``, the tokens per second that a score compares with, as plain data.
    """
    known = {name: Layout.from_dict(value) for name, value in study["layouts"].items()}
    options = StudyOptions.model_validate(study["options"])
    asked = with_point(parse_job(study["job"]), config, known)
    raw = asked.model_dump(mode="json")
    job = shortened(raw, options.steps, run_name(options), study["url"], options.by_speed)
    if not options.population_based:
        _train(job, options, study, None)
        return
    part = present_part(job.name, config)
    job = job_of_part(job, part, options.exchange_steps)
    with slot(options.name, study["concurrent"]):
        _train(job, options, study, part)


def _train(job: JobConfig, options: StudyOptions, study: dict[str, Any], part: MemberRun | None) -> None:
    """One run to its end, with reports to Tune.

    Raises:
        TrialFailedError: it ended without the figures that the study is about.
    """
    needed = parse_objective(options.objective).metrics
    asked = (partial(_completed, job, study), needed, job.steps)
    reports = (
        MemberReports(*asked, part=part, interval=options.exchange_steps) if part else TrialReports(*asked)
    )
    metrics = _ended(job) or _fitted(job, reports)
    if metrics["status"] != "finished":
        raise TrialFailedError(f"run {job.name} was {metrics['status']} at step {metrics['step']}")
    figures = _completed(job, study, metrics)
    if lacking := [name for name in needed if not finite(figures.get(name))]:
        raise TrialFailedError(f"{lacking[0]} is {figures.get(lacking[0])} after {job.steps} steps")
    reports.end({**figures, "failures": len(metrics["failures"])}, metrics["step"])


def _completed(job: JobConfig, study: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A run's figures with those that follow from them."""
    figures = {name: measured.get(name) for name in ("loss", "eval_loss", "tokens_per_s", "wall_s")}
    figures |= derived(job, figures["tokens_per_s"] or 0.0, study["device"])
    return {**figures, "score": score(figures, study["reference"])}


def derived(job: JobConfig, tokens_per_s: float, device: str) -> dict[str, Any]:
    """Figures by the planner's formulas: the layout, shares of memory free and of the device used.

    ``free_memory`` is an estimate (``planner.memory``); ``utilisation`` is the seconds of the model's
    arithmetic at the profile's rate over the measured seconds of a step.
    """
    profile = profile_of(device)
    layout = choose_layout(job, job.cluster.max_workers, profile).layout
    step_s = job.data.global_batch * job.data.sequence_length / tokens_per_s if tokens_per_s else math.inf
    return {
        "run": job.name,
        "ran": str(layout),
        "workers": layout.world_size,
        "free_memory": 1 - memory_estimate(job, layout).total_bytes / profile.memory_bytes,
        "utilisation": min(1.0, step_cost(job, layout, profile).compute_s / step_s),
    }


def _fitted(job: JobConfig, reports: TrialReports) -> dict[str, Any]:
    """Train a run to its end; returns its metrics.

    Raises:
        StudyStorageError: its storage is full or gone.
    """
    trainer = ElasticTrainer(job, run_config=RunConfig(name=job.name, callbacks=[reports]))
    try:
        return trainer.fit().metrics or {}
    except ControllerError as error:
        if isinstance(error.controller_failure, StorageError):
            raise StudyStorageError(str(error.controller_failure)) from error
        raise
    except StorageError as error:
        raise StudyStorageError(str(error)) from error


def _ended(job: JobConfig) -> dict[str, Any]:
    """Metrics of a run that has trained all its steps already; empty where it has not.

    Raises:
        TrialFailedError: it spent its failure budget, and is not tried again when Tune retries its trial.
    """
    found = get_or_none(open_storage(job.storage, job.name), "summary.json")
    summary = {} if found is None else decode_json("summary.json", found)
    if summary.get("status") == "failed":
        raise TrialFailedError(summary["detail"])
    if summary.get("status") != "finished" or summary["steps"] != job.steps:
        return {}
    return {**summary, "loss": summary["final_loss"], "step": summary["steps"]}
