"""One trial: a run of its own name, driven by a thin actor of Ray Tune's.

The actor reserves ``DRIVER_CPUS`` and computes nothing; the run's workers reserve their own resources, on any
node, and may be lost and replaced without the trial's knowing. A trial whose actor was killed is started
again by Tune and resumes its run. A run that failed for good raises, here and when Tune starts it again: an
out-of-memory error ends that trial, with its reason, and no other.
"""

from __future__ import annotations

import math
from typing import Any

from ray import tune
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import RunConfig

from picotron_ray.checkpoint.storage.base import decode_json, get_or_none
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.ray_train.trainer import ElasticTrainer
from tuning.errors import TrialFailedError
from tuning.objectives import score
from tuning.plan import SweepOptions, shortened, trial_job
from tuning.spaces import with_point

DRIVER_CPUS = 0.1


class ReportToTune(UserCallback):
    """Callback that tells Tune every new held-out loss; its scheduler may end the trial by it."""

    def __init__(self) -> None:
        self._reported = 0

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        figures = metrics[0]
        if figures.get("eval_step", 0) > self._reported and "tokens_per_s" in figures:
            self._reported = figures["eval_step"]
            tune.report(
                {name: figures.get(name) for name in ("loss", "eval_loss", "tokens_per_s")}
                | {
                    "step": self._reported,
                    "finished": False,
                }
            )


def run_name(options: dict[str, Any]) -> str:
    """The name of the calling trial's run: the same whenever Tune starts the trial again."""
    return f"{options['name']}.{tune.get_context().get_trial_id()}"


def train_trial(config: dict[str, Any], sweep: dict[str, Any]) -> None:
    """Train one trial: Tune's trainable.

    Args:
        config: what this trial tries: ``layout`` and ``learning_rate``.
        sweep: what all trials share: ``job``, ``options`` and ``url``, as plain data.
    """
    job = trial_job(
        parse_job(sweep["job"]),
        SweepOptions.model_validate(sweep["options"]),
        run_name(sweep["options"]),
        Layout.from_dict(config["layout"]),
        config["learning_rate"],
        sweep["url"],
    )
    _refuse_what_failed(job)
    result = ElasticTrainer(job, run_config=RunConfig(name=job.name, callbacks=[ReportToTune()])).fit()
    metrics = result.metrics or {}
    if metrics["status"] != "finished":
        raise TrialFailedError(f"run {job.name} was {metrics['status']} at step {metrics['step']}")
    figures = {name: metrics[name] for name in ("step", "loss", "eval_loss", "tokens_per_s", "wall_s")}
    tune.report({**figures, "finished": True, "failures": len(metrics["failures"])})


def study_trial(config: dict[str, Any], study: dict[str, Any]) -> None:
    """Train one trial of a study: Tune's trainable.

    Args:
        config: the trial's point.
        study: what all trials share: ``job``, ``options``, ``layouts``, ``url`` and ``reference``, the
            tokens per second that a score compares with, as plain data.
    """
    known = {name: Layout.from_dict(value) for name, value in study["layouts"].items()}
    asked = with_point(parse_job(study["job"]), config, known)
    raw, options = asked.model_dump(mode="json"), study["options"]
    job = shortened(raw, options["steps"], run_name(options), study["url"])
    _refuse_what_failed(job)
    callbacks: list[UserCallback] = [ReportToTune()] if options["scheduler"] == "asha" else []
    result = ElasticTrainer(job, run_config=RunConfig(name=job.name, callbacks=callbacks)).fit()
    metrics = result.metrics or {}
    if metrics["status"] != "finished":
        raise TrialFailedError(f"run {job.name} was {metrics['status']} at step {metrics['step']}")
    figures = {name: metrics[name] for name in ("step", "loss", "eval_loss", "tokens_per_s", "wall_s")}
    figures |= derived(job, figures["tokens_per_s"] or 0.0, study["device"])
    figures["score"] = score(figures, study["reference"])
    tune.report({**figures, "finished": True, "failures": len(metrics["failures"])})


def derived(job: JobConfig, tokens_per_s: float, device: str) -> dict[str, Any]:
    """Figures by the planner's formulas: the layout, shares of memory free and of the device used.

    ``free_memory`` is an estimate (``planner.memory``); ``utilisation`` is the seconds of the model's
    arithmetic at the profile's rate over the measured seconds of a step.
    """
    profile = profile_of(device)
    layout = choose_layout(job, job.cluster.max_workers, profile).layout
    step_s = job.data.global_batch * job.data.sequence_length / tokens_per_s if tokens_per_s else math.inf
    return {
        "ran": str(layout),
        "workers": layout.world_size,
        "free_memory": 1 - memory_estimate(job, layout).total_bytes / profile.memory_bytes,
        "utilisation": min(1.0, step_cost(job, layout, profile).compute_s / step_s),
    }


def _refuse_what_failed(job: JobConfig) -> None:
    """A run that spent its failure budget is not tried again when Tune retries its trial."""
    summary = get_or_none(open_storage(job.storage, job.name), "summary.json")
    ended = {} if summary is None else decode_json("summary.json", summary)
    if ended.get("status") == "failed":
        raise TrialFailedError(ended["detail"])
