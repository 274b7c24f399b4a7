"""Config of what surrounds the steps: machines, recovery, snapshots, storage, metrics, scripted faults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from picotron_ray.config.schema.base import Section

RUN_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
RunName = Annotated[str, Field(pattern=RUN_NAME)]


def _as_text(value: Any) -> Any:
    """Take what YAML reads as a time for its text; a config knows no clock."""
    return value.isoformat() if hasattr(value, "isoformat") else value


Moment = Annotated[str, BeforeValidator(_as_text)]


class ClusterConfig(Section):
    """Machines to use: numbers of workers, their device, CPU slots and memory.

    Example::

        cluster:
          device: cuda
          min_workers: 4
          max_workers: 8
    """

    min_workers: int = Field(default=1, ge=1, description="fewest workers that the run goes on with")
    max_workers: int = Field(default=4, ge=1, description="most workers that the run uses")
    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto", description="auto: cuda where Ray offers GPUs, else cpu"
    )
    cpus_per_worker: float = Field(
        default=1.0, ge=0, description="CPU slots that each worker reserves in Ray"
    )
    worker_memory_bytes: int | None = Field(
        default=None,
        ge=2**20,
        description="most private host memory that a worker may take beyond what it has at its first step,"
        " enforced by the kernel (RLIMIT_DATA); the planner does not look at it; null: no limit",
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="longest wait for max_workers before min_workers will do"
    )
    autoscale: bool = Field(
        default=False,
        description="Ray's autoscaler adds nodes: ask it for what is missing of max_workers, and wait for"
        " min_workers rather than refuse a cluster that is too small now",
    )
    max_wall_s: float | None = Field(
        default=None,
        gt=0,
        description="longest time from a launch's begin to its end: it stops with a commit while there is"
        " just time for one, and exits with 75, so that a queue launches it again; null: no limit",
    )
    deadline: Moment | None = Field(
        default=None,
        description="absolute time by which a launch must be over, as max_wall_s has it: ISO 8601 with a"
        " zone, such as 2027-01-31T08:00:00Z; one that has passed is refused; null: none",
    )
    failure_domain_label: str | None = Field(
        default="ray.io/availability-zone",
        description="Ray node label whose value names a node's failure domain, such as its rack: replicas of"
        " a part of the state are kept in different ones where that is possible; null, or a node without that"
        " label: each node is its own",
    )
    interface: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.:@-]{1,15}$",
        description="network interface that carries the run, the same on every node: the rendezvous store,"
        " gloo and the shard service listen there and nowhere else; null: lo in a Ray that launch starts,"
        " else the one of the node's address in Ray",
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="accept RAY_AUTH_MODE=disabled, with which whoever reaches Ray's ports runs code as you",
    )
    local_cpus: int | None = Field(
        default=None, ge=1, description="CPU slots of a Ray that launch starts; null: enough"
    )


def _off(value: Any) -> Any:
    """Take false for ``off``: YAML reads the bare word so."""
    return "off" if value is False else value


class ElasticConfig(Section):
    """Failure detection and recovery.

    Example::

        elastic:
          max_failures: 20
          node_timeout_s: 10.0
          first_step_timeout_s: 300.0
          on_nonfinite: stop
          on_spike: skip
    """

    max_failures: int = Field(
        default=100, ge=0, description="failures of any kind within 24 hours before the run gives up (exit 3)"
    )
    max_failures_without_progress: int = Field(
        default=6, ge=1, description="failures in a row at the same step before exit 3"
    )
    heartbeat_s: float = Field(default=1.0, gt=0, description="interval of a node agent's heartbeat")
    node_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="silence after which a node counts as lost, or a member that its node's heartbeats lack",
    )
    hang_factor: float = Field(
        default=3.0, ge=1, description="a phase longer than this times its learned p99 is a hang"
    )
    hang_floor_s: float = Field(default=1.0, gt=0, description="a hang is never called sooner than this")
    first_step_timeout_s: float = Field(
        default=60.0, gt=0, description="limit of a phase whose length is not yet known"
    )
    compile_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="limit of one compilation, and of a first step where members may compile",
    )
    interrupt_timeout_s: float = Field(
        default=2.0, gt=0, description="a member that does not stop in time is killed"
    )
    on_nonfinite: Literal["skip", "rewind", "stop"] = Field(
        default="skip",
        description="answer to a loss or gradient that is NaN or infinite. skip: leave the step's update out;"
        " rewind: go back to an older state and pass over the samples up to the step; stop: end the run"
        " before it (exit 3)",
    )
    on_spike: Annotated[Literal["off", "skip", "rewind"], BeforeValidator(_off)] = Field(
        default="off",
        description="answer to a loss above both mean + 6 standard deviations and 1.2 x mean of the last 100"
        " updates. off: none; skip: leave the step's update out; rewind: as for on_nonfinite",
    )
    rewind_steps: int = Field(
        default=20,
        ge=1,
        description="a rewind goes to the newest state that is at least so many steps older than the bad"
        " step, or to the oldest one there is; the default is twice the memory of Adam's first moment",
    )
    max_rewinds: int = Field(
        default=3, ge=1, description="rewinds within `skip_window_steps` before the run ends (exit 3)"
    )
    max_skipped_steps: int = Field(
        default=10, ge=0, description="skipped steps within `skip_window_steps` before the run ends (exit 3)"
    )
    skip_window_steps: int = Field(
        default=1000, ge=1, description="steps within which skipped ones and rewinds are counted"
    )
    grow: bool = Field(
        default=True, description="re-mesh up when workers join and the planner says that it pays"
    )
    replace_workers: bool = Field(
        default=True, description="start a new worker for a dead one where resources allow"
    )


class SnapshotConfig(Section):
    """Host-memory snapshots, which a recovery looks at first.

    Example::

        snapshot:
          interval_steps: 10
          overflow_folder: /var/tmp/slots
    """

    interval_steps: int | Literal["auto"] = Field(
        default="auto",
        description="auto, from measurement: on CPUs ceil(copy and digest time / (0.5 x step time)); on CUDA"
        " what a snapshot makes steps wait is at most 2 % of them, and one ends before the next begins",
    )
    slots: int = Field(default=3, ge=3, description="snapshot slots per worker")
    folder: str = Field(default="/dev/shm", description="memory file system that holds the slots")
    overflow_folder: str | None = Field(
        default=None, description="disk folder to use where `folder` is too small"
    )
    fetch_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="how long a node that holds another's snapshot may be silent, or take over 16 MiB, before"
        " another source is used",
    )
    serve_bytes_per_s: int | None = Field(
        default=4 << 30,
        ge=1 << 20,
        description="most bytes a second of snapshots that a node's agent sends to others; null: no limit",
    )


class StorageConfig(Section):
    """Storage of checkpoints: a local folder or S3.

    Example::

        storage:
          url: s3://my-bucket/runs
          region: eu-central-1
    """

    url: str = Field(
        default="./runs", description="a local folder, or s3://bucket/prefix; the run's name is appended"
    )
    endpoint_url: str | None = Field(default=None, description="S3 endpoint other than AWS")
    region: str | None = Field(default=None, description="S3 region")
    path_style: bool = Field(default=False, description="address buckets by path rather than by host name")
    kms_key: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9:/_+=,.@-]{1,2048}$",
        description="id, alias or ARN of an AWS KMS key by which S3 encrypts every object that the run writes"
        " (SSE-KMS); null: as the bucket does by default",
    )
    retry_deadline_s: float = Field(
        default=60.0,
        gt=0,
        description="how long one attempt (an upload, a commit) waits for storage that does not answer; then"
        " it has failed and is tried again, for as long as the run trains",
    )
    call_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="longest that one call may take, its retries included; then it counts as failed, even"
        " where it hangs; null: twice retry_deadline_s, at least 60",
    )
    final_wait_s: float = Field(
        default=3600.0,
        ge=0,
        description="how long a run that has nothing else left to do waits for storage that keeps failing,"
        " before it ends with exit 4 and keeps its snapshots for the next launch",
    )


class CheckpointConfig(Section):
    """Commits to storage: their interval, and how many are kept.

    Example::

        checkpoint:
          interval_steps: 100
          keep_last: 2
          keep_every_steps: 1000
          codec: zstd
    """

    interval_steps: int = Field(default=50, ge=1, description="steps between commits")
    keep_last: int = Field(default=3, ge=1, description="newest commits to keep")
    keep_every_steps: int | None = Field(
        default=None, ge=1, description="also keep commits at multiples of this step"
    )
    keep_best: str | None = Field(
        default=None,
        description="figure whose lowest value marks a commit that is kept too: eval_loss, or eval_loss/NAME"
        " of a held-out set; a commit has those of the evaluation at its own step; null: none",
    )
    codec: Literal["none", "zstd"] = Field(default="none", description="lossless compression of chunks")
    gc_grace_s: float = Field(
        default=3600.0, ge=0, description="time between condemning a chunk and deleting it"
    )
    resume_step: int | None = Field(
        default=None,
        ge=0,
        description="go back to the commit of this step, which voids later ones; once: launched again with"
        " the same value, the run goes on from the newest; null: the newest",
    )


class InitFromConfig(Section):
    """Initial weights from a commit of another run; without ``run`` they are drawn from ``seed``.

    Example::

        name: second
        init_from:
          run: first
          step: 1000
    """

    run: RunName | None = Field(default=None, description="name of the run whose commit to start from")
    url: str | None = Field(
        default=None, description="storage that holds that run, as in storage.url; null: this run's own"
    )
    step: int | None = Field(
        default=None, ge=0, description="committed step to take; null: the newest one at the first launch"
    )
    optimizer_state: bool = Field(
        default=False,
        description="take the optimizer's moments too; false: weights alone, moments start at zero. Step"
        " count, learning-rate schedule and samples start anew either way",
    )


class MetricsConfig(Section):
    """Prometheus endpoints of the coordinator and of every node's agent.

    Example::

        metrics:
          host: 0.0.0.0
          port: 9400
          coordinator_port: 9401
    """

    enabled: bool = Field(default=True, description="serve metrics, and show the run to Ray's own endpoints")
    host: str | None = Field(
        default=None,
        description="address to listen at; null: 127.0.0.1 in a Ray that launch starts, else the node's own",
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="port of the agents; 0: a free one, named by the run's status"
    )
    coordinator_port: int = Field(
        default=0, ge=0, le=65535, description="port of the coordinator; 0: a free one, named by the status"
    )


class TrackerConfig(Section):
    """Tracker: it gets a row for every committed step, and for every evaluation.

    Example::

        trackers:
          - kind: csv
          - kind: wandb
            project: essays
    """

    kind: Literal["csv", "jsonl", "tensorboard", "wandb", "mlflow"] = Field(
        description="csv, jsonl, tensorboard: files; wandb and mlflow need the extra of that name"
    )
    folder: str | None = Field(
        default=None,
        description="folder of the files, on the coordinator's node; null: `trackers` beside the event logs",
    )
    project: str | None = Field(
        default=None, description="wandb: project, mlflow: experiment; null: picotron_ray"
    )
    url: str | None = Field(
        default=None, description="wandb, mlflow: server; null: what the library finds in its environment"
    )


PHASES = (
    "idle",
    "rendezvous",  # joining the generation's process groups
    "build",  # model, mesh, optimizer
    "restore",  # reading state from slots
    "compile",  # within any other phase: torch.compile at work
    "storage",  # reading state from a commit, and waiting for storage or for members that do
    "data",  # waiting for the prefetched batch
    "forward",  # forward pass; under a pipeline schedule the whole of forward and backward
    "backward",
    "reduce",  # gradient reduction over data-parallel replicas
    "clip",  # global gradient norm
    "sync",  # the step's one exchange of loss, digests and flags between all ranks
    "optimizer",  # from before the first write to after the last one; then the ledger line
    "snapshot",  # copying to a slot (in the background of the next step)
    "evaluate",
    "flush",  # writing the clean live state to a slot on the way out
    "commit",  # coordinator only: between the manifest and its log entry
    "grow",  # waiting until the slots are large enough for a checkpoint
    "queue",  # waiting for nodes that serve others first, and for members that read slots of other nodes
    "hold",  # staying at a step boundary, all ranks together, as a person or a tool asks
)
