"""The configuration of one run: frozen pydantic models, unknown keys refused, units in field names.

Importing this module loads neither torch nor Ray.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from picotron_ray.config.builder import IMPORT_PATH, BuiltModel, PlanConfig
from picotron_ray.config.layout import Zero
from picotron_ray.config.moe import MoeConfig
from picotron_ray.config.recompute import PATTERN
from picotron_ray.config.rope import RopeScaling
from picotron_ray.config.schedules import Schedule
from picotron_ray.config.section import Section

RunName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
END_OF_DOCUMENT = 256  # after the ids of the 256 bytes
Degree = Annotated[int, Field(ge=1)] | Literal["auto"]


class ModelConfig(Section):
    """A Llama-style decoder (RMSNorm, rotary positions, grouped queries, SwiGLU), GPT-2, or your own."""

    family: Literal["llama", "gpt2"] = Field(
        default="llama",
        description="llama: as other keys say; gpt2: LayerNorm, learned positions, GELU, biases, no dropout",
    )
    vocab_size: int = Field(
        default=264, ge=2, description="rows of the embedding; at least the tokenizer's vocabulary"
    )
    hidden_size: int = Field(default=128, ge=2, description="width of the residual stream")
    intermediate_size: int = Field(default=352, ge=1, description="width of the hidden layer of a block")
    layers: int = Field(default=4, ge=1, description="decoder blocks")
    heads: int = Field(default=4, ge=1, description="query heads")
    kv_heads: int = Field(default=2, ge=1, description="key/value heads; divides heads")
    head_dim: int | None = Field(
        default=None, ge=2, description="width of one head, an even number; null: hidden_size / heads"
    )
    qkv_bias: bool = Field(default=False, description="biases of the q, k and v projections (Qwen2)")
    qk_norm: bool = Field(
        default=False, description="RMSNorm over each head of q and k before they are turned (Qwen3)"
    )
    sliding_window: int | None = Field(
        default=None,
        ge=1,
        description="tokens that a token sees, itself included (Mistral); null: all before it",
    )
    rope_scaling: RopeScaling = Field(
        default_factory=RopeScaling, description="stretching of the rotary positions (Llama 3)"
    )
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    max_positions: int | None = Field(
        default=None, ge=1, description="gpt2: rows of the table of learned positions, its longest sequence"
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norms")
    tie_embeddings: bool = Field(default=False, description="share the embedding matrix with the output head")
    init_std: float = Field(default=0.02, gt=0, description="standard deviation of the initial weights")
    moe: MoeConfig = Field(
        default_factory=MoeConfig, description="a mixture of experts instead of the SwiGLU"
    )
    builder: str | None = Field(
        default=None,
        pattern=IMPORT_PATH,
        description="a model of your own: import path package.module:function of what builds it; of the keys"
        " above only vocab_size applies then",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the builder; plain data"
    )
    plan: PlanConfig = Field(default_factory=PlanConfig, description="how a model of your own is cut")
    built: BuiltModel | None = Field(default=None, description="filled in by launch; leave it out")

    def __hash__(self) -> int:  # ``arguments`` and ``tensor`` are mappings
        return hash(self.model_dump_json())

    @property
    def is_gpt2(self) -> bool:
        """Whether blocks are GPT-2's: LayerNorm, GELU, a bias in every linear layer, no rotary positions."""
        return self.family == "gpt2"

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.heads

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_size

    @property
    def depth(self) -> int:
        """Number of repeated blocks; 0 where launch has not looked into the module yet."""
        if self.builder is None:
            return self.layers
        return len(self.built.blocks) if self.built else 0


class DataConfig(Section):
    """Where samples come from. A sample is ``sequence_length`` + 1 consecutive tokens of one stream."""

    source: Literal["stdlib", "text", "jsonl", "memmap"] = Field(
        default="stdlib",
        description="stdlib: the Python standard library's own source files; text: UTF-8 files; jsonl: one"
        " JSON object per line; memmap: raw token ids in one file per split",
    )
    path: str | None = Field(default=None, description="file, folder or glob; not used by stdlib")
    text_key: str = Field(default="text", description="jsonl: the key that holds the text")
    memmap_dtype: Literal["uint8", "uint16", "uint32"] = Field(
        default="uint16", description="memmap: type of a token id"
    )
    sequence_length: int = Field(default=128, ge=1, description="tokens per sample that are predicted")
    global_batch: int = Field(
        default=32, ge=1, description="samples per optimizer step, the same at every layout"
    )
    held_out_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of documents kept for evaluation"
    )
    document_masks: bool = Field(
        default=False,
        description="a token attends only to tokens of its own document within the sample; loss and order of"
        " samples stay",
    )
    end_token: int | None = Field(
        default=None,
        ge=0,
        description="memmap: the id that ends a document, for document_masks; other sources write their own",
    )
    prefetch_steps: int = Field(default=2, ge=1, description="steps loaded ahead, off the critical path")

    @property
    def document_end(self) -> int | None:
        """The id that ends a document; None where token files do not say."""
        return self.end_token if self.source == "memmap" else END_OF_DOCUMENT


class ScheduleConfig(Section):
    """Learning-rate schedule; multiplies ``optimizer.learning_rate``."""

    kind: Literal["constant", "cosine", "wsd"] = Field(
        default="cosine", description="wsd: warm-up, stable, decay (Hu et al. 2024, MiniCPM)"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from 0")
    decay_steps: int = Field(default=0, ge=0, description="wsd: steps of linear decay at the end")
    final_ratio: float = Field(
        default=0.1, ge=0, le=1, description="learning rate at the last step, as a share of the peak"
    )


class OptimizerConfig(Section):
    """The optimizer; its state is canonical like the weights."""

    name: Literal["adamw", "sgd", "muon"] = Field(
        default="adamw",
        description="adamw (Loshchilov & Hutter 2019), plain sgd, or muon (Jordan et al. 2024) for the"
        " matrices inside blocks, each expert's by itself, with adamw for all else",
    )
    learning_rate: float = Field(
        default=1e-3,
        gt=0,
        description="peak learning rate; muon's update is scaled to the size of adamw's (Liu et al. 2025), so"
        " the same rate and decay suit both",
    )
    momentum: float = Field(
        default=0.95, ge=0, lt=1, description="muon: decay of the momentum (Nesterov's), per step"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="adamw: decay of the first moment, per step")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="adamw: decay of the second moment, per step")
    eps: float = Field(default=1e-8, gt=0, description="adamw: added to the root of the second moment")
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="decoupled decay, times the learning rate per step; not applied to norms and biases"
        " (1-d tensors)",
    )
    decay_embeddings: bool = Field(
        default=True,
        description="apply weight_decay to embeddings too, and so to a head that shares theirs; a head of its"
        " own always decays",
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest global gradient norm; null: no clipping"
    )
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="learning-rate schedule")


class LayoutConfig(Section):
    """Parallel degrees to use; ``auto`` leaves a degree to the planner at every generation."""

    dp: Degree = Field(default="auto", description="data-parallel replicas")
    tp: Degree = Field(default="auto", description="tensor-parallel ranks")
    pp: Degree = Field(default="auto", description="pipeline stages")
    cp: Degree = Field(
        default=1, description="context-parallel ranks, which share every row; auto: where it pays or must be"
    )
    ep: Degree = Field(
        default="auto", description="ranks that share the experts of a block; folded over dp x cp"
    )
    context: Literal["ring", "all-gather"] = Field(
        default="ring",
        description="how attention sees the keys of other ranks, where cp > 1: ring holds two parts of them"
        " at a time, all-gather all of them",
    )
    zero: Zero | Literal["auto"] = Field(
        default="auto",
        description="what replicas share out: 0 nothing, 1 weights and optimizer state (gathered and reduced"
        " once per step), 2 gradients too, 3 weights also within the step (FSDP2)",
    )
    replicate: Degree = Field(
        default=1,
        description="copies of what zero 1 to 3 share out (HSDP), each over 1/replicate of dp x cp; auto:"
        " where the planner says that it pays",
    )
    schedule: Schedule = Field(
        default="1f1b",
        description="pipeline schedule, where pp > 1; all but afab and 1f1b cut more than one stage per rank",
    )
    virtual_stages: Degree = Field(
        default="auto", description="stages per pipeline rank; auto: as few as the schedule asks"
    )
    micro_batch: Degree = Field(default="auto", description="samples per micro-batch and replica")
    recompute: str = Field(
        default="auto",
        pattern=f"{PATTERN}|^auto$",
        description="which blocks compute their activations again in the backward pass: none, full, selective"
        " (all but matrix products and attention), every-N, middle-P (percent), blocks-K (of every stage);"
        " auto: as few as the memory budget asks",
    )
    memory_budget_gib: float | None = Field(
        default=None,
        gt=0,
        description="device memory that a worker may take, by the planner's estimate; null: 90 % of all",
    )


class AdaptivePrecisionConfig(Section):
    """Which parts of the model compute in ``precision``, by measurement; the others stay in fp32."""

    error_bound: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="relative error of the held-out loss that low precision may add: at the start of every"
        " generation the most sensitive blocks' attentions, hidden layers and the head are kept in fp32 until"
        " it holds; null: everything computes in precision",
    )
    batches: int = Field(
        default=2, ge=1, description="held-out batches that each part is measured on; the worst one counts"
    )


class KernelsConfig(Section):
    """Which implementations compute."""

    attention: Literal["auto", "flash", "efficient", "cudnn", "flash-attn", "math"] = Field(
        default="auto",
        description="auto: the first that the device offers of flash, efficient, math; flash, efficient and"
        " cudnn are torch's, flash-attn needs the extra flash, math is the formulas",
    )
    experts: Literal["auto", "loop", "grouped"] = Field(
        default="auto",
        description="products of a mixture's experts: one after the other, or grouped into one kernel (not in"
        " fp64); auto: grouped on CUDA",
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of every block; the first step of a generation compiles, so that"
        " elastic.first_step_timeout_s must leave time for it",
    )


class ClusterConfig(Section):
    """Which machines to use."""

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
    local_cpus: int | None = Field(
        default=None, ge=1, description="CPU slots of a Ray that launch starts; null: enough"
    )


class ElasticConfig(Section):
    """Failure detection and recovery."""

    max_failures: int = Field(
        default=100, ge=0, description="failures of any kind before the run gives up (exit 3)"
    )
    max_failures_without_progress: int = Field(
        default=6, ge=1, description="failures in a row at the same step before exit 3"
    )
    heartbeat_s: float = Field(default=1.0, gt=0, description="interval of a node agent's heartbeat")
    node_timeout_s: float = Field(default=5.0, gt=0, description="silence after which a node counts as lost")
    hang_factor: float = Field(
        default=3.0, ge=1, description="a phase longer than this times its learned p99 is a hang"
    )
    hang_floor_s: float = Field(default=1.0, gt=0, description="a hang is never called sooner than this")
    first_step_timeout_s: float = Field(
        default=60.0, gt=0, description="limit of a phase whose length is not yet known"
    )
    interrupt_timeout_s: float = Field(
        default=2.0, gt=0, description="a member that does not stop in time is killed"
    )
    grow: bool = Field(
        default=True, description="re-mesh up when workers join and the planner says that it pays"
    )
    replace_workers: bool = Field(
        default=True, description="start a new worker for a dead one where resources allow"
    )


class SnapshotConfig(Section):
    """Host-memory snapshots, the first rung of recovery."""

    interval_steps: int | Literal["auto"] = Field(
        default="auto", description="auto: ceil(copy and digest time / (0.5 x step time)), from measurement"
    )
    slots: int = Field(default=3, ge=3, description="snapshot slots per worker")
    folder: str = Field(default="/dev/shm", description="memory file system that holds the slots")
    overflow_folder: str | None = Field(
        default=None, description="disk folder to use where `folder` is too small"
    )


class StorageConfig(Section):
    """Where checkpoints are kept."""

    url: str = Field(
        default="./runs", description="a local folder, or s3://bucket/prefix; the run's name is appended"
    )
    endpoint_url: str | None = Field(default=None, description="S3 endpoint other than AWS")
    region: str | None = Field(default=None, description="S3 region")
    path_style: bool = Field(default=False, description="address buckets by path rather than by host name")
    retry_deadline_s: float = Field(
        default=60.0, gt=0, description="how long an outage of storage is waited out"
    )


class CheckpointConfig(Section):
    """When state is committed to storage."""

    interval_steps: int = Field(default=50, ge=1, description="steps between commits")
    keep_last: int = Field(default=3, ge=1, description="newest commits to keep")
    keep_every_steps: int | None = Field(
        default=None, ge=1, description="also keep commits at multiples of this step"
    )
    codec: Literal["none", "zstd"] = Field(default="none", description="lossless compression of chunks")
    gc_grace_s: float = Field(
        default=3600.0, ge=0, description="time between condemning a chunk and deleting it"
    )
    resume_step: int | None = Field(
        default=None, ge=0, description="resume from this committed step; null: the newest"
    )


class InitFromConfig(Section):
    """Initial weights from a commit of another run; without ``run`` they are drawn from ``seed``."""

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


class EvaluateConfig(Section):
    """Loss on held-out data."""

    interval_steps: int = Field(
        default=50, ge=1, description="steps between evaluations; the last step is always evaluated"
    )
    samples: int = Field(
        default=64, ge=1, description="held-out samples per evaluation, always the same ones"
    )


class MetricsConfig(Section):
    """Prometheus endpoints of the coordinator and of every node's agent."""

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
    """One place that gets a row for every committed step, and every evaluation."""

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


class ChaosFault(Section):
    """One scripted fault, for tests, demos and drills."""

    fault: Literal["kill", "stop", "hang", "remove-node"] = Field(
        description="kill: SIGKILL; stop: SIGSTOP; hang: a thread that never returns;"
        " remove-node: the whole node"
    )
    target: str = Field(
        description="worker:<rank> of the running generation, node:<index>, or coordinator",
        pattern=r"^(worker:\d+|node:\d+|coordinator)$",
    )
    step: int = Field(ge=1, description="optimizer step (1-based) at which it strikes, once per run")
    phase: str = Field(default="forward", description="phase of the step, by its name in the heartbeat page")


class JobConfig(Section):
    """Everything that defines a run."""

    name: RunName = Field(default="quickstart", description="name of the run")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="seed of weights and sample order")
    steps: int = Field(default=200, ge=1, le=10**12, description="optimizer steps")
    precision: Precision = Field(
        default="fp32",
        description="arithmetic of matrix products; weights, gradients and moments stay fp32 under tf32"
        " (CUDA), bf16 and fp16, which scales its loss and repeats a step whose gradients overflow",
    )
    adaptive_precision: AdaptivePrecisionConfig = Field(
        default_factory=AdaptivePrecisionConfig, description="precision part by part"
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    data: DataConfig = Field(default_factory=DataConfig, description="the data")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="the optimizer")
    layout: LayoutConfig = Field(default_factory=LayoutConfig, description="parallel degrees")
    kernels: KernelsConfig = Field(default_factory=KernelsConfig, description="implementations")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="machines")
    elastic: ElasticConfig = Field(
        default_factory=ElasticConfig, description="failure detection and recovery"
    )
    snapshot: SnapshotConfig = Field(default_factory=SnapshotConfig, description="host-memory snapshots")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="checkpoint storage")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="commits")
    init_from: InitFromConfig = Field(
        default_factory=InitFromConfig, description="start from another run's commit"
    )
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="held-out loss")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Prometheus endpoints")
    trackers: tuple[TrackerConfig, ...] = Field(default=(), description="where the curves go")
    chaos: tuple[ChaosFault, ...] = Field(default=(), description="scripted faults")
