"""Metrics that the coordinator serves of steps: utilisation, phases, communication and goodput.

Those of phases, communication and stragglers are of the newest round of telemetry, over all ranks.
"""

from __future__ import annotations

from picotron_ray.observability.metric import Metric

STEPS = (
    Metric(
        "picotron_training_mfu_ratio",
        "gauge",
        "ratio",
        "Model FLOPs utilisation of the newest finished step; the label names the peak that it relates to.",
        "coordinator",
        ("peak",),
    ),
    Metric(
        "picotron_training_utilization_ratio",
        "gauge",
        "ratio",
        "Share of the devices' time in which they compute, mean over ranks.",
        "coordinator",
    ),
    Metric(
        "picotron_training_phase_seconds",
        "gauge",
        "seconds",
        "Seconds per step by phase, over ranks and steps; the means add up to the step.",
        "coordinator",
        ("phase", "statistic"),
    ),
    Metric(
        "picotron_training_communication_ratio",
        "gauge",
        "ratio",
        "Share of a step that waits for communication which nothing hides (phases reduce and sync).",
        "coordinator",
    ),
    Metric(
        "picotron_training_data_wait_ratio",
        "gauge",
        "ratio",
        "Share of a step that waits for the loader (phase data).",
        "coordinator",
    ),
    Metric(
        "picotron_training_straggler_ratio",
        "gauge",
        "ratio",
        "Own seconds per step of the slowest rank over the median of all ranks.",
        "coordinator",
    ),
    Metric(
        "picotron_training_sent_bytes",
        "gauge",
        "bytes",
        "Bytes that a rank sends per step along an axis of the layout, mean over ranks.",
        "coordinator",
        ("axis",),
    ),
    Metric(
        "picotron_training_link_latency_seconds",
        "gauge",
        "seconds",
        "Time of a sum of one number along an axis, on the slowest rank; measured every 200 steps.",
        "coordinator",
        ("axis",),
    ),
    Metric(
        "picotron_training_link_bandwidth_bytes_per_second",
        "gauge",
        "bytes_per_second",
        "Bus bandwidth of a sum of 1 MiB along an axis, on the slowest rank; measured every 200 steps.",
        "coordinator",
        ("axis",),
    ),
    Metric(
        "picotron_training_link_efficiency_ratio",
        "gauge",
        "ratio",
        "That bandwidth over the best that the run has seen on the axis.",
        "coordinator",
        ("axis",),
    ),
    Metric(
        "picotron_training_goodput_ratio",
        "gauge",
        "ratio",
        "Share of the time that the run lived which its steps would have taken, undisturbed.",
        "coordinator",
    ),
    Metric(
        "picotron_training_lost_seconds",
        "gauge",
        "seconds",
        "Time that the run lost, by cause: recovery (failure to the next new step), recompute (steps that"
        " were repeated, at the median step), checkpoint (longest wait of an optimizer for each commit).",
        "coordinator",
        ("cause",),
    ),
    Metric(
        "picotron_checkpoint_durability_lag_steps",
        "gauge",
        "steps",
        "Finished steps that no commit holds yet.",
        "coordinator",
    ),
)
