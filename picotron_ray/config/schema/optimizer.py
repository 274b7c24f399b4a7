"""Config of the optimizer and its learning rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.errors import install_extra

TORCHAO = f"which needs torchao; on every node {install_extra('8bit')}, or use full"
"""What to do where moments cannot be kept in 8 bits for want of it."""


class ScheduleConfig(Section):
    """Learning-rate schedule; multiplies ``optimizer.learning_rate``.

    Example::

        optimizer:
          schedule:
            kind: wsd
            warmup_steps: 20
            decay_steps: 50
    """

    kind: Literal["constant", "cosine", "wsd"] = Field(
        default="cosine", description="wsd: warm-up, stable, decay (Hu et al. 2024, MiniCPM)"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from 0")
    decay_steps: int = Field(default=0, ge=0, description="wsd: steps of linear decay at the end")
    final_ratio: float = Field(
        default=0.1, ge=0, le=1, description="learning rate at the last step, as a share of the peak"
    )


class ParameterGroupConfig(Section):
    """Parameters with a learning rate or weight decay of their own, by a pattern of their names.

    Example::

        optimizer:
          groups:
            - pattern: embed.*
              rate_factor: 0.5
            - pattern: "*.down.weight"
              weight_decay: 0.0
    """

    pattern: str = Field(
        min_length=1,
        description="glob of canonical parameter names (layers.*.attention.*); * matches dots too, and of"
        " several groups that match a name the first counts",
    )
    rate_factor: float = Field(default=1.0, gt=0, description="factor of the learning rate")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="decoupled decay of all that the pattern matches, norms and biases too; null: as without"
        " the group",
    )


class OptimizerConfig(Section):
    """Optimizer; its state is stored uncut, as the weights are.

    Example::

        optimizer:
          name: muon
          learning_rate: 3.0e-3
          weight_decay: 0.1
    """

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
    offload: bool = Field(
        default=False,
        description="adamw on CUDA: keep the moments in pinned host memory and update them there, on"
        " cluster.cpus_per_worker threads (ZeRO-Offload, Ren et al. 2021); weights and gradients stay on the"
        " device",
    )
    moments: Literal["full", "8bit"] = Field(
        default="full",
        description="adamw's, and of what muon leaves to it: full, like the weights, or 8bit: in blocks of"
        " 256 with a scale each (Dettmers et al. 2022; extra 8bit), but not of tensors of which a rank holds"
        " less than 4096 elements or no whole blocks; checkpoints hold them in fp32",
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest global gradient norm; null: no clipping"
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="keep an exponential moving average of the weights beside the moments, in their type: the"
        " share of it that stays per update; null: none. Begun in a run that had none, it starts as the"
        " weights are; a smaller share forgets them sooner",
    )
    groups: tuple[ParameterGroupConfig, ...] = Field(
        default=(), description="parameters with a rate or decay of their own, by patterns of their names"
    )
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="learning-rate schedule")
