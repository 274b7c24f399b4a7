"""Bytes of device memory per worker: weights, gradients, moments and activations of the largest stage.

A stated estimate, not a measurement: fragmentation and the kernels' workspaces are left out, so the planner
keeps a margin (``USABLE``).
"""

from __future__ import annotations

from dataclasses import dataclass

from picotron_ray.config.actions import action_list
from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.recompute import Kind, recomputed
from picotron_ray.config.schedules import in_flight
from picotron_ray.planner.counts import (
    joined_parameters,
    sizes_of,
    stage_depth,
    stage_parameters,
)

# auto, before launch has settled it, is thought of as the widest that it may come to
STATE_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 4,
    "fp16": 4,
    "fp8": 4,
    "auto": 4,
}  # weights, gradients, moments
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "auto": 4}  # activations
MOMENTS = {"adamw": 2, "sgd": 0, "muon": 2}  # per parameter; muon has one of each matrix inside a block
OFFLOAD_STAGING_BYTES = 4 * 32 * 2**20  # two buckets of gradients and two of updates (train.offload)
USABLE = 0.9  # share of the device's memory that an estimate may fill


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the fullest worker of a layout."""

    state_bytes: float
    """weights, gradients, and optimizer moments where they are not offloaded"""
    gathered_bytes: float
    """weights gathered for computation under ZeRO, and gradients before their reduction"""
    activation_bytes: float
    """what the backward passes in flight still need"""
    update_bytes: float = 0.0
    """what the optimizer's update makes besides, when all backward passes are done"""
    host_state_bytes: float = 0.0
    """of the host: offloaded optimizer moments"""
    host_activation_bytes: float = 0.0
    """of the host: offloaded activations, of all micro-batches in flight"""

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + max(self.gathered_bytes + self.activation_bytes, self.update_bytes)


def memory_estimate(job: JobConfig, layout: Layout) -> MemoryEstimate:
    """The fullest pipeline stage's memory, in bytes per worker."""
    ranks = (_rank_memory(job, layout, rank) for rank in range(layout.pp))
    return max(ranks, key=lambda estimate: estimate.total_bytes)


def _rank_memory(job: JobConfig, layout: Layout, rank: int) -> MemoryEstimate:
    size = STATE_BYTES[job.precision]
    sizes = sizes_of(job.model)
    stages = layout.rank_stages(rank)
    parameters = sum(
        stage_parameters(job.model, layout.stages, stage, layout.tp, layout.ep) for stage in stages
    )
    depth = sum(stage_depth(job.model, layout.stages, stage) for stage in stages)
    mine = _sharded(job, layout, parameters, depth) if layout.zero else parameters
    state, host = size * (2 + MOMENTS[job.optimizer.name]) * mine, 0.0  # weight and gradient, moments
    if job.optimizer.offload:
        host = size * MOMENTS[job.optimizer.name] * mine
        state += min(OFFLOAD_STAGING_BYTES, 2 * size * mine) - host
    held = sizes.block - sizes.experts + sizes.experts // layout.ep
    if job.optimizer.name == "muon":
        matrices = depth * (held - sizes.block + sizes.matrices) / layout.tp
        matrices = _sharded(job, layout, matrices, depth) if layout.zero else matrices
        state, mine = state - size * matrices, mine - matrices
    block = sizes.whole_block + (held - sizes.whole_block) / layout.tp
    gathered = 0.0
    if layout.zero:
        # whole weights between forward and backward, or of the block at work and the one fetched ahead
        weights = parameters if layout.zero < 3 else 2 * block
        # gradients of a whole step, or of one block; torch's pipelines reduce once per step
        gradients = parameters if layout.zero == 1 or layout.pp > 1 else block
        gathered = (weights + gradients) * size
    update = mine * size if job.kernels.optimizer == "foreach" else 0.0  # roots of the second moments, of all
    away = offloaded_activations(job, layout, rank) * _in_flight(job, layout, rank)
    return MemoryEstimate(state, gathered, _activations(job, layout, rank), update, host, away)


def _sharded(job: JobConfig, layout: Layout, parameters: float, depth: int) -> float:
    """What ZeRO leaves of the parameters of ``depth`` layers: equal ranks share them, experts their own."""
    sizes = sizes_of(job.model)
    experts = depth * (sizes.experts // layout.ep) / layout.tp
    return (parameters - experts) / layout.shards + experts / layout.expert_shards


def _activations(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes kept for backward: of every block in flight, and on the last stage logits and their gradient.

    Of those there are a chunk's at a time under the linear cross-entropy.

    How many micro-batches are in flight is the schedule's (``config.schedules.in_flight``). Tensor
    parallelism cuts all of it where it comes with sequence parallelism; else it is counted whole.
    """
    sizes = sizes_of(job.model)
    tokens = layout.micro_batch * job.data.sequence_length // layout.cp
    kept = _kept_elements(job, layout, rank) * COMPUTE_BYTES[job.precision]
    logits = 2 * sizes.vocabulary * STATE_BYTES[job.precision] if rank == layout.last_stage_rank else 0
    cut = layout.tp if sizes.sequence_cut else 1
    at_once = min(tokens, job.kernels.loss_chunk) if job.kernels.loss == "linear" else tokens
    here = (tokens * kept + at_once * logits) / cut
    return here + _masks(job, layout, rank) + _joined(job, layout, rank)


def _joined(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes of weights that fused projections copy, kept for backward by every micro-batch in flight.

    Nothing is copied that lies together, which needs no ZeRO and no stack of experts. Copies that autocast
    makes either way are not counted, nor those of blocks that are computed again.
    """
    cast = job.precision in ("bf16", "fp16") and job.adaptive_precision.error_bound is None
    if job.kernels.projections != "fused" or cast:
        return 0.0
    dense, experts = joined_parameters(job.model)
    one = ((dense if layout.zero else 0) + experts / layout.ep) / layout.tp * STATE_BYTES[job.precision]
    return one * _kinds(job, layout, rank).count("kept") * _in_flight(job, layout, rank)


def _kinds(job: JobConfig, layout: Layout, rank: int) -> list[Kind]:
    """What becomes of the activations of each of a rank's blocks."""
    depths = (stage_depth(job.model, layout.stages, stage) for stage in layout.rank_stages(rank))
    return [kind for depth in depths for kind in recomputed(layout.recompute, depth)]


def _masks(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes of document masks kept for backward: whole rows squared, of every micro-batch in flight.

    The blocks of a stage share one, unless a window makes each its own. Where cp cuts rows, masks are made of
    one part at a time and none is kept.
    """
    if not job.data.document_masks or layout.cp > 1:
        return 0.0
    length, window, stages = job.data.sequence_length, job.model.sliding_window, layout.rank_stages(rank)
    masks = len(stages)
    if window is not None and window < length:
        masks = sum(stage_depth(job.model, layout.stages, stage) for stage in stages)
    one = layout.micro_batch * length**2 * COMPUTE_BYTES[job.precision]
    return one * masks * _in_flight(job, layout, rank)


def _kept_elements(job: JobConfig, layout: Layout, rank: int) -> float:
    """Elements per token that a rank's blocks keep for backward, of all micro-batches in flight.

    A block that is computed again keeps its input, or the results of its matrix products; while its backward
    pass runs, it has all of one micro-batch once more.
    """
    of, kinds = _kept_by_kind(job), _kinds(job, layout, rank)
    again = of["kept"] if any(kind != "kept" for kind in kinds) else 0
    if layout.offload_activations:  # the block at work and the one that travels
        return 2 * max((of[kind] for kind in kinds), default=0) + again
    return sum(of[kind] for kind in kinds) * _in_flight(job, layout, rank) + again


def _kept_by_kind(job: JobConfig) -> dict[Kind, int]:
    """Elements per token that a block keeps for backward, by what becomes of its activations."""
    sizes = sizes_of(job.model)
    whole = sizes.activations
    if job.kernels.activation == "compiled":  # silu of the gate is computed again
        whole -= job.model.intermediate_size
    return {"kept": whole, "full": sizes.hidden, "selective": sizes.products}


def offloaded_activations(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes that a pipeline rank's blocks send to the host, and get back, per micro-batch."""
    if not layout.offload_activations:
        return 0.0
    of = _kept_by_kind(job)
    tokens = layout.micro_batch * job.data.sequence_length // layout.cp
    cut = layout.tp if sizes_of(job.model).sequence_cut else 1
    elements = sum(of[kind] for kind in _kinds(job, layout, rank))
    return tokens * elements * COMPUTE_BYTES[job.precision] / cut


def budget_bytes(job: JobConfig, device_bytes: float) -> float:
    """What an estimate may come to on a device of ``device_bytes``."""
    asked = job.layout.memory_budget_gib
    most = USABLE * device_bytes
    return most if asked is None else min(most, asked * 2**30)


def _in_flight(job: JobConfig, layout: Layout, rank: int) -> float:
    if layout.pp == 1:
        return 1.0
    if layout.schedule == "custom":
        return action_list(job.layout.actions).in_flight[rank]
    micro_batches = layout.micro_batches(job.data.global_batch)
    return in_flight(layout.schedule, layout.pp, layout.virtual_stages, rank, micro_batches)
