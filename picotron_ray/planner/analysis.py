"""Numbers of a model before it is trained: parameters, bytes, FLOPs, and what of it fits a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import finetuned_table
from picotron_ray.planner.hardware import Hardware
from picotron_ray.planner.kept_activations import STATE_BYTES
from picotron_ray.planner.memory import MOMENTS, averages, budget_bytes, memory_estimate
from picotron_ray.planner.model_sizes import (
    active_parameters,
    flops_per_token,
    parameter_count,
    trained_elements,
)
from picotron_ray.planner.plan import for_devices

ZEROS = (0, 1, 2, 3)
MOST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Analysis:
    """Numbers of a model that its config tells.

    Fields:
        parameters, active, trainable: of the whole model, those that a token goes through, and those that
            the optimizer moves.
        bytes: of weights by dtype: as they are kept, and as they are computed with; of a folder, as its files
            have them.
        state_bytes: weights, gradients and moments of the optimizer, without any sharding.
        flops_per_token, flops_per_step: forward and backward.
        sequence_length, global_batch, precision: tokens of a row, rows of a step, and how they are computed.
        memory_bytes: of the fullest rank by ZeRO stage, one row a micro-batch, over ``gpus`` replicas.
        largest_micro_batch: rows that fit a device by ZeRO stage, without and with full recomputation;
            0: none does.
    """

    parameters: int
    active: int
    trainable: int
    bytes: dict[str, int]
    state_bytes: int
    flops_per_token: float
    flops_per_step: float
    sequence_length: int
    global_batch: int
    precision: str
    gpus: int
    hardware: str
    memory_bytes: dict[str, float]
    largest_micro_batch: dict[str, dict[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """The analysis as plain data, with the names that scripts rely on."""
        return asdict(self)


def analyse(job: JobConfig, gpus: int, hardware: Hardware, held: dict[str, int] | None = None) -> Analysis:
    """Analyse the model of a job on so many devices.

    Args:
        held: bytes by dtype that the files of a checkpoint have; None: there are none.
    """
    job, hardware = for_devices(job, gpus, hardware.device), hardware.of_devices(gpus)
    count, trained, data = parameter_count(job.model), trained_elements(job.model), job.data
    kept, computed = STATE_BYTES[job.precision], COMPUTE_BYTES[job.precision]
    flops = flops_per_token(job.model, data.sequence_length)
    budget = budget_bytes(job, hardware.profile.memory_bytes)
    return Analysis(
        parameters=_all_parameters(job, count),
        active=active_parameters(job.model),
        trainable=trained,
        bytes=held or {_dtype(kept): kept * count, job.precision: computed * count},
        state_bytes=kept * (count + (1 + MOMENTS[job.optimizer.name] + averages(job)) * trained),
        flops_per_token=flops,
        flops_per_step=flops * data.global_batch * data.sequence_length,
        sequence_length=data.sequence_length,
        global_batch=data.global_batch,
        precision=job.precision,
        gpus=gpus,
        hardware=hardware.name,
        memory_bytes={
            str(zero): memory_estimate(job, _layout(gpus, zero)).total_bytes for zero in _zeros(gpus)
        },
        largest_micro_batch={
            str(zero): {
                policy: _largest(job, replace(_layout(gpus, zero), recompute=policy), budget)
                for policy in ("none", "full")
            }
            for zero in _zeros(gpus)
        },
    )


def _all_parameters(job: JobConfig, trained: int) -> int:
    """Parameters of the whole model, those that no gradient moves too."""
    if job.model.builder is not None:
        return trained
    return sum(spec.numel for spec in finetuned_table(job.model))


def _dtype(size: int) -> str:
    return {8: "fp64", 4: "fp32", 2: "bf16"}[size]


def _zeros(gpus: int) -> tuple[int, ...]:
    """ZeRO stages that differ from none: on one device nothing can be sharded."""
    return ZEROS if gpus > 1 else (0,)


def _layout(gpus: int, zero: int) -> Layout:
    return Layout(dp=gpus, zero=zero)  # type: ignore[arg-type]


def _largest(job: JobConfig, layout: Layout, budget: float) -> int:
    """Most rows of a micro-batch within ``budget`` bytes, by bisection; memory grows with the rows."""

    def fits(rows: int) -> bool:
        return memory_estimate(job, replace(layout, micro_batch=rows)).total_bytes <= budget

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_ROWS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
