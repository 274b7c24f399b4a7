"""Metrics catalogue: every metric that a run serves, as data.

It is the one source of exporters, dashboard and documentation.

Names are ``picotron_<what>_<unit>`` in Prometheus' base units, counters end in ``_total``; a figure without
a unit (a norm, a number of a generation) has the unit "1" and no suffix. A figure that is not known yet
has no series, rather than a 0 that nobody measured.

Each process adds the labels that it has for everything: the coordinator ``run``, an agent ``run`` and
``node``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
Server = Literal["coordinator", "agent"]

SERVER_LABELS: dict[Server, tuple[str, ...]] = {"coordinator": ("run",), "agent": ("run", "node")}
"""Labels of every series that a process serves."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of the catalogue.

    Fields:
        unit: the suffix of the name (before ``_total``); "1": none.
        labels: those beyond ``SERVER_LABELS``.
        buckets: upper bounds of a histogram, ascending, without infinity.
        needs_gpu: has series only on machines with an NVIDIA GPU.
        in_ray: also given to Ray (as ``ray_<name>``), so that Ray's own service discovery leads to the run.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    server: Server
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    needs_gpu: bool = False
    in_ray: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (*SERVER_LABELS[self.server], *self.labels)


STEP_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
RECOVERY_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
COMMIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)

_WORKER = ("worker",)
_GPU = ("gpu",)

TRAINING = (
    Metric(
        "picotron_training_steps",
        "gauge",
        "steps",
        "Newest finished optimizer step; falls where a recovery goes back.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_target_steps",
        "gauge",
        "steps",
        "Steps at which the run ends (steps of the config).",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_loss_nats",
        "gauge",
        "nats",
        "Mean loss per token of the newest finished step.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_eval_loss_nats",
        "gauge",
        "nats",
        "Mean loss per token of the newest evaluation on held-out data.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_baseline_loss_nats",
        "gauge",
        "nats",
        "Bigram entropy of the same data: what a model of pairs of tokens reaches.",
        "coordinator",
    ),
    Metric(
        "picotron_training_tokens_per_second",
        "gauge",
        "tokens_per_second",
        "Tokens of a global batch over the time of the newest finished step.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_tokens_total",
        "counter",
        "tokens",
        "Tokens trained on since step 0; a step that a recovery repeats counts once.",
        "coordinator",
    ),
    Metric(
        "picotron_training_gradient_norm",
        "gauge",
        "1",
        "Global gradient norm of the newest finished step, before clipping.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_learning_rate",
        "gauge",
        "1",
        "Learning rate of the newest finished step.",
        "coordinator",
        in_ray=True,
    ),
)

ELASTIC = (
    Metric(
        "picotron_elastic_state",
        "gauge",
        "1",
        "1 for the state that the coordinator's machine is in, 0 for every other.",
        "coordinator",
        ("state",),
    ),
    Metric(
        "picotron_elastic_workers",
        "gauge",
        "workers",
        "Members of the running generation.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_elastic_generation",
        "gauge",
        "1",
        "Number of the running generation within its term.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_elastic_term",
        "gauge",
        "1",
        "Number of the coordinator's term; one more after each restart of it.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_elastic_generations_total",
        "counter",
        "generations",
        "Generations begun; each beyond the first is a re-mesh.",
        "coordinator",
    ),
    Metric(
        "picotron_elastic_failures_total",
        "counter",
        "failures",
        "Interruptions of training, by the gravest sign of each.",
        "coordinator",
        ("kind",),
    ),
    Metric(
        "picotron_elastic_recovery_seconds",
        "histogram",
        "seconds",
        "Time from the detection of a failure to the first finished new step.",
        "coordinator",
        buckets=RECOVERY_BUCKETS_S,
    ),
    Metric(
        "picotron_elastic_lost_steps_total",
        "counter",
        "steps",
        "Finished steps that recoveries had to repeat.",
        "coordinator",
    ),
    Metric(
        "picotron_elastic_events_total",
        "counter",
        "events",
        "Events for people, by level.",
        "coordinator",
        ("level",),
    ),
)

CHECKPOINT = (
    Metric(
        "picotron_checkpoint_commits_total",
        "counter",
        "commits",
        "Commits to storage that this coordinator knows of.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_newest_steps",
        "gauge",
        "steps",
        "Step of the newest commit.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_checkpoint_age_seconds",
        "gauge",
        "seconds",
        "Time since the newest commit.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_size_bytes",
        "gauge",
        "bytes",
        "Stored size of the newest commit, chunks shared with older ones included.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_written_bytes_total",
        "counter",
        "bytes",
        "New chunks that commits put into storage.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_commit_seconds",
        "histogram",
        "seconds",
        "Time to write a commit's manifest and log entry, after its upload.",
        "coordinator",
        buckets=COMMIT_BUCKETS_S,
    ),
    Metric(
        "picotron_checkpoint_stall_seconds",
        "gauge",
        "seconds",
        "Longest time that a worker's optimizer waited for the newest commit's copy.",
        "coordinator",
    ),
)

WORKER = (
    Metric(
        "picotron_worker_step_seconds",
        "histogram",
        "seconds",
        "Time of every step that the worker finished, counted by the worker itself.",
        "agent",
        _WORKER,
        buckets=STEP_BUCKETS_S,
    ),
    Metric(
        "picotron_worker_resident_bytes",
        "gauge",
        "bytes",
        "Resident memory of the process.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_cpu_seconds_total",
        "counter",
        "seconds",
        "CPU time that the process has used, all threads.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_snapshot_seconds",
        "gauge",
        "seconds",
        "Time to copy and digest the newest snapshot, in the background.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_snapshot_wait_seconds_total",
        "counter",
        "seconds",
        "Time that the optimizer waited for snapshots in the running generation.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_skipped_snapshots_total",
        "counter",
        "snapshots",
        "Snapshots of the running generation that found no free slot.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_cuda_allocated_bytes",
        "gauge",
        "bytes",
        "CUDA memory in tensors, as of the newest snapshot.",
        "agent",
        _WORKER,
        needs_gpu=True,
    ),
    Metric(
        "picotron_worker_cuda_reserved_bytes",
        "gauge",
        "bytes",
        "CUDA memory that torch's allocator holds, as of the newest snapshot.",
        "agent",
        _WORKER,
        needs_gpu=True,
    ),
)

NODE = (
    Metric("picotron_node_workers", "gauge", "workers", "Living workers on the node.", "agent"),
    Metric(
        "picotron_node_slot_bytes",
        "gauge",
        "bytes",
        "Snapshot slots of the run on the node.",
        "agent",
    ),
    Metric(
        "picotron_node_memory_file_system_free_bytes",
        "gauge",
        "bytes",
        "Free space where the snapshot slots are (snapshot.folder).",
        "agent",
    ),
)

GPU = (
    Metric(
        "picotron_gpu_utilization_ratio",
        "gauge",
        "ratio",
        "Share of the last sampling period in which a kernel ran.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_memory_used_bytes",
        "gauge",
        "bytes",
        "Memory in use by all processes.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_memory_size_bytes",
        "gauge",
        "bytes",
        "Memory of the GPU.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_temperature_celsius",
        "gauge",
        "celsius",
        "Temperature of the chip.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_power_watts",
        "gauge",
        "watts",
        "Power drawn by the board.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_ecc_errors_total",
        "counter",
        "errors",
        "Uncorrected memory errors in the life of the GPU.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
)

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Training": TRAINING,
    "Elasticity": ELASTIC,
    "Checkpoints": CHECKPOINT,
    "Workers": WORKER,
    "Nodes": NODE,
    "GPUs": GPU,
}
"""The catalogue, by the dashboard's rows."""

CATALOGUE: dict[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}
"""The catalogue, by name."""


def bucket_of(value: float, buckets: tuple[float, ...]) -> int:
    """Index of the bucket that a value falls into; upper bounds belong to their bucket."""
    return sum(value > bound for bound in buckets)


def series_of(metric: Metric) -> tuple[str, ...]:
    """Names of the time series that a metric turns into."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "count", "sum"))
    return (metric.name,)
