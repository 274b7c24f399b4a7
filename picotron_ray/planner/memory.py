"""Bytes of device memory per worker: weights, gradients, moments and activations of the largest stage.

A stated estimate, not a measurement: fragmentation and the kernels' workspaces are left out, so the planner
keeps a margin (``USABLE``).
"""

from __future__ import annotations

from dataclasses import dataclass

from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.planner.counts import sizes_of, stage_parameters

STATE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}  # weights, gradients and moments; bf16 keeps fp32 masters
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}  # activations
MOMENTS = {"adamw": 2, "sgd": 0}
USABLE = 0.9  # share of the device's memory that an estimate may fill


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the fullest worker of a layout."""

    state_bytes: float
    """weights, gradients and optimizer moments"""
    gathered_bytes: float
    """weights gathered for computation under ZeRO, and the gradient of one block before its reduction"""
    activation_bytes: float
    """what the backward passes in flight still need"""

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.gathered_bytes + self.activation_bytes


def memory_estimate(job: JobConfig, layout: Layout) -> MemoryEstimate:
    """The fullest pipeline stage's memory, in bytes per worker."""
    stages = (_stage_memory(job, layout, stage) for stage in {0, layout.pp - 1})
    return max(stages, key=lambda estimate: estimate.total_bytes)


def _stage_memory(job: JobConfig, layout: Layout, stage: int) -> MemoryEstimate:
    size = STATE_BYTES[job.precision]
    sizes = sizes_of(job.model)
    parameters = stage_parameters(job.model, layout.pp, stage, layout.tp)
    copies = 2 + MOMENTS[job.optimizer.name]  # weight and gradient, moments
    state = parameters * size * copies / (layout.replicas if layout.zero else 1)
    block = sizes.whole_block + (sizes.block - sizes.whole_block) / layout.tp
    gathered = 0.0
    if layout.zero == 2:  # all weights stay gathered from forward to backward
        gathered = (parameters + block) * size
    elif layout.zero == 3:  # the block at work and the one fetched ahead, and one block's gradient
        gathered = 3 * block * size
    return MemoryEstimate(state, gathered, _activations(job, layout, stage))


def _activations(job: JobConfig, layout: Layout, stage: int) -> float:
    """Bytes kept for backward: of every block in flight, and on the last stage logits and their gradient.

    AFAB keeps every micro-batch, 1F1B at most one per stage that follows (Narayanan et al. 2021). Tensor
    parallelism cuts all of it where it comes with sequence parallelism; else it is counted whole.
    """
    sizes = sizes_of(job.model)
    tokens = layout.micro_batch * job.data.sequence_length // layout.cp
    elements = sizes.activations * (sizes.layers // layout.pp)
    in_flight = _in_flight(job, layout, stage)
    kept = elements * COMPUTE_BYTES[job.precision] * in_flight
    logits = 2 * sizes.vocabulary * STATE_BYTES[job.precision] if stage == layout.pp - 1 else 0
    return tokens * (kept + logits) / (layout.tp if sizes.sequence_cut else 1)


def _in_flight(job: JobConfig, layout: Layout, stage: int) -> int:
    micro_batches = layout.micro_batches(job.data.global_batch)
    if layout.pp == 1:
        return 1
    return micro_batches if layout.schedule == "afab" else min(micro_batches, layout.pp - stage)
