"""The configuration of one run: frozen pydantic models, unknown keys refused, units in field names.

Importing this module loads neither torch nor Ray.
"""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.schema.adapt import AdaptConfig
from picotron_ray.config.schema.alerts import AlertsConfig
from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.chaos import ChaosFault
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.config.schema.compute import (
    AdaptivePrecisionConfig,
    Fp8Config,
    KernelsConfig,
    LayoutConfig,
    Precision,
)
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.debug import DebugConfig
from picotron_ray.config.schema.evaluate import EvaluateConfig
from picotron_ray.config.schema.memory import MemoryConfig
from picotron_ray.config.schema.meta import MetaConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.config.schema.service import (
    CheckpointConfig,
    ClusterConfig,
    ElasticConfig,
    InitFromConfig,
    MetricsConfig,
    RunName,
    SnapshotConfig,
    StorageConfig,
    TrackerConfig,
)
from picotron_ray.config.schema.telemetry import TelemetryConfig


class JobConfig(Section):
    """Config of one run: everything that defines it.

    A key that is left out has its default.

    Example::

        name: essays
        steps: 1000
        precision: bf16
        data:
          source: text
          path: essays/
        cluster:
          max_workers: 8
    """

    name: RunName = Field(default="quickstart", description="name of the run")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="seed of weights and sample order")
    steps: int = Field(default=200, ge=1, le=10**12, description="optimizer steps")
    precision: Precision = Field(
        default="fp32",
        description="arithmetic of matrix products; weights, gradients and moments stay fp32 under tf32"
        " (CUDA), bf16 and fp16, which scales its loss and repeats a step whose gradients overflow; fp8: the"
        " linear layers inside blocks, by torchao (extra fp8), all else as bf16; auto:"
        " settled for the whole run at its first launch, bf16 where every device has it, else fp16 on CUDA,"
        " fp32 on CPUs",
    )
    adaptive_precision: AdaptivePrecisionConfig = Field(
        default_factory=AdaptivePrecisionConfig, description="precision part by part"
    )
    fp8: Fp8Config = Field(default_factory=Fp8Config, description="scales of fp8")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    data: DataConfig = Field(default_factory=DataConfig, description="the data")
    meta: MetaConfig = Field(default_factory=MetaConfig, description="learning from tasks")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="the optimizer")
    layout: LayoutConfig = Field(default_factory=LayoutConfig, description="parallel degrees")
    comm: CommConfig = Field(default_factory=CommConfig, description="how gradients travel")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="a worker's memory")
    kernels: KernelsConfig = Field(default_factory=KernelsConfig, description="implementations")
    adapt: AdaptConfig = Field(default_factory=AdaptConfig, description="changes while the run goes on")
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
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="figures of steps")
    alerts: AlertsConfig = Field(default_factory=AlertsConfig, description="rules over telemetry")
    debug: DebugConfig = Field(default_factory=DebugConfig, description="records for debugging, and checks")
    trackers: tuple[TrackerConfig, ...] = Field(default=(), description="where the curves go")
    chaos: tuple[ChaosFault, ...] = Field(default=(), description="scripted faults")
