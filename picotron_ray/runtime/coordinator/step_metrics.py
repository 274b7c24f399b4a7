"""Figures of steps that the coordinator serves: of the newest round of telemetry, and of goodput."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.exporter import Sample
from picotron_ray.planner.peaks import mfu_ratio, peak_of_worker
from picotron_ray.runtime.coordinator.records import MetricFacts

LINKS = {
    "latency_seconds": "latency_s",
    "bandwidth_bytes_per_second": "bandwidth_bytes_per_s",
    "efficiency_ratio": "efficiency_ratio",
}
"""Figures of a link by the end of their metric's name."""


def step_samples(
    job: JobConfig, status: dict[str, Any], measured: MetricFacts, devices: set[str]
) -> Iterator[Sample]:
    """Samples of what is known.

    Args:
        devices: product names of the GPUs that the run computes on; empty: CPUs, or not known.
    """
    yield from _mfu(job, status, devices)
    if status["telemetry"]:
        yield from _telemetry(status["telemetry"])
    if measured.goodput is not None:
        yield Sample("picotron_training_goodput_ratio", measured.goodput)
    for cause, seconds in lost_seconds(status["failures"], measured).items():
        yield Sample("picotron_training_lost_seconds", seconds, {"cause": cause})
    if measured.generations:
        lag = max(0, status["step"] - (status["committed"] or 0))
        yield Sample("picotron_checkpoint_durability_lag_steps", lag)


def _mfu(job: JobConfig, status: dict[str, Any], devices: set[str]) -> Iterator[Sample]:
    peak = peak_of_worker(job, devices)
    if peak is not None and status["tokens_per_s"] and status["members"]:
        share = mfu_ratio(job, status["tokens_per_s"], len(status["members"]), peak)
        yield Sample("picotron_training_mfu_ratio", share, {"peak": peak.source})


def _telemetry(told: dict[str, Any]) -> Iterator[Sample]:
    for phase, window in told["phase_s"].items():
        for statistic, value in window.items():
            labels = {"phase": phase, "statistic": statistic}
            yield Sample("picotron_training_phase_seconds", value, labels)
    step_s, spent = told["step_s"]["mean"], {name: one["mean"] for name, one in told["phase_s"].items()}
    if step_s:
        waited = spent["reduce"] + spent["sync"]
        yield Sample("picotron_training_communication_ratio", min(1.0, waited / step_s))
        yield Sample("picotron_training_data_wait_ratio", min(1.0, spent["data"] / step_s))
    if told["utilization"]:
        yield Sample("picotron_training_utilization_ratio", told["utilization"])
    if told["waits_seen"] and told["slow_ranks"]:
        yield Sample("picotron_training_straggler_ratio", told["slow_ranks"][0]["ratio"])
    for axis, nbytes in told["sent_bytes"].items():
        yield Sample("picotron_training_sent_bytes", nbytes, {"axis": axis})
    for axis, link in told.get("links", {}).items():
        for name, figure in LINKS.items():
            yield Sample(f"picotron_training_link_{name}", link[figure], {"axis": axis})


def lost_seconds(failures: list[dict[str, Any]], measured: MetricFacts) -> dict[str, float]:
    """Seconds that a run lost, by cause."""
    return {
        "recovery": sum(failure["recovered_s"] or 0.0 for failure in failures),
        "recompute": measured.step_s * sum(failure["lost_steps"] for failure in failures),
        "checkpoint": sum(commit.get("stall_s") or 0.0 for commit in measured.checkpoints),
    }
