"""Figures that the coordinator measures for the endpoints of ``observability.exporter``.

Called by a scrape, on the endpoint's thread: everything here reads copies or files and waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from picotron_ray.config.schema.adapt import KINDS
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.policies.adaptation import ACTIONS
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import REPORTED
from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.coordinator_metrics import (
    COMMIT_BUCKETS_S,
    PLAN_BUCKETS_S,
    RECOVERY_BUCKETS_S,
)
from picotron_ray.observability.exporter import Distribution, Sample
from picotron_ray.runtime.coordinator.records import MetricFacts
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.step_metrics import step_samples

NO_EVENTS = 1 << 62
Devices = Callable[[], set[str]]
"""Tells the product names of the GPUs that the run computes on."""
LEVELS = ("info", "warning", "error")


class CoordinatorFigures:
    """Figures of a run, as its coordinator knows it."""

    def __init__(
        self, job: JobConfig, record: RunRecord, state: Callable[[], MachineState], devices: Devices = set
    ) -> None:
        """``state``: of the coordinator's machine, as of now."""
        self._job, self._record, self._state, self._devices = job, record, state, devices

    def __call__(self) -> list[Sample]:
        """Measure all samples whose figures are known."""
        status, measured = self._record.status(NO_EVENTS, most_pages=0), self._record.measured()
        return [
            *_training(status, measured),
            *step_samples(self._job, status, measured, self._devices()),
            *self._elastic(status, measured),
            *_checkpoints(measured),
        ]

    def _elastic(self, status: dict[str, Any], measured: MetricFacts) -> Iterator[Sample]:
        failures, state = status["failures"], self._state()
        for known in MachineState:
            yield Sample("picotron_elastic_state", float(known is state), {"state": str(known)})
        for kind in REPORTED:
            count = sum(failure["kind"] == kind for failure in failures)
            yield Sample("picotron_elastic_failures_total", count, {"kind": kind.value})
        for level in LEVELS:
            yield Sample("picotron_elastic_events_total", measured.noted.get(level, 0), {"level": level})
        for origin in ("planned", "default"):
            count = measured.plans.get(origin, 0)
            yield Sample("picotron_elastic_planned_generations_total", count, {"origin": origin})
        for change in KINDS:
            for action in ACTIONS:
                count = measured.changes.get(f"{change} {action}", 0)
                labels = {"change": change, "action": action}
                yield Sample("picotron_elastic_adaptations_total", count, labels)
        searches = Distribution.of(measured.planned_s, PLAN_BUCKETS_S)
        yield Sample("picotron_elastic_planner_seconds", searches)
        yield Sample("picotron_elastic_lost_steps_total", sum(failure["lost_steps"] for failure in failures))
        recoveries = [failure["recovered_s"] for failure in failures if failure["recovered_s"] is not None]
        distribution = Distribution.of(recoveries, RECOVERY_BUCKETS_S)
        yield Sample("picotron_elastic_recovery_seconds", distribution)
        yield Sample("picotron_elastic_workers", len(status["members"]))
        yield Sample("picotron_elastic_term", status["term"])
        yield Sample("picotron_elastic_generations_total", measured.generations)
        if measured.generation is not None:
            yield Sample("picotron_elastic_generation", measured.generation)


def _training(status: dict[str, Any], measured: MetricFacts) -> Iterator[Sample]:
    page = measured.leader if measured.leader.get("step_time_s") else {}  # else no step is behind it
    figures = {
        "picotron_training_steps": status["step"] if measured.generations else None,
        "picotron_training_target_steps": status["steps"],
        "picotron_training_loss_nats": page.get("loss"),
        "picotron_training_eval_loss_nats": status["eval_loss"],
        "picotron_training_eval_loss_before_nats": status.get("eval_loss_before"),
        "picotron_training_baseline_loss_nats": status["baseline_loss"] or None,
        "picotron_training_tokens_per_second": status["tokens_per_s"],
        "picotron_training_tokens_total": measured.tokens,
        "picotron_training_gradient_norm": page.get("grad_norm"),
        "picotron_training_learning_rate": page.get("learning_rate"),
        "picotron_data_padding_ratio": page.get("padding_ratio"),
        "picotron_data_curriculum_stage": page.get("stage"),
    }
    yield from (Sample(name, value) for name, value in figures.items() if value is not None)
    for name, loss in status["eval_sets"].items():
        if loss is not None:
            yield Sample("picotron_training_eval_set_loss_nats", loss, {"set": name})


def _checkpoints(measured: MetricFacts) -> Iterator[Sample]:
    commits = measured.checkpoints
    seconds = [commit["commit_s"] for commit in commits if "commit_s" in commit]
    written = sum(commit.get("written_bytes", 0) for commit in commits)
    yield Sample("picotron_checkpoint_commits_total", len(commits))
    yield Sample("picotron_checkpoint_written_bytes_total", written)
    yield Sample("picotron_checkpoint_commit_seconds", Distribution.of(seconds, COMMIT_BUCKETS_S))
    if not commits or measured.committed_at_s is None:
        return
    yield Sample("picotron_checkpoint_newest_steps", commits[-1]["step"])
    yield Sample("picotron_checkpoint_age_seconds", max(0.0, time.time() - measured.committed_at_s))
    yield Sample("picotron_checkpoint_stall_seconds", commits[-1]["stall_s"])
    if "bytes" in commits[-1]:
        yield Sample("picotron_checkpoint_size_bytes", commits[-1]["bytes"])


def essentials(samples: list[Sample]) -> dict[str, float]:
    """Pick the figures that Ray is given too: value by name."""
    return {
        sample.name: sample.value
        for sample in samples
        if CATALOGUE[sample.name].in_ray and not isinstance(sample.value, Distribution)
    }
