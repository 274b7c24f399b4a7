"""Memory model: bytes per worker of weights, gradients, moments and activations of the largest stage.

This is an estimate. Fragmentation and the kernels' workspaces are left out, so the planner keeps a margin
(``USABLE``).
"""

from __future__ import annotations

from dataclasses import dataclass

from picotron_ray.config.schema.comm import COMPRESSED
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import attention_masks, norm_kernel
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks, RecomputeKind
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.model_sizes import (
    blocks_again,
    sizes_of,
    stage_depth,
    stage_parameters,
    tied_copy,
)

# auto, until launch has resolved it, counts as the widest precision that it may become
STATE_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 4,
    "fp16": 4,
    "fp8": 4,
    "auto": 4,
}  # weights, gradients, moments
MOMENTS = {"adamw": 2, "sgd": 0, "muon": 2}  # per parameter; muon has one of each matrix inside a block
MOMENT_8BIT_BYTES = 1 + 4 / 256
"""Of a moment in 8 bits: its code and its part of a scale. Small tensors keep wide moments, not counted."""
DECODED_BYTES = 30  # per parameter of the bucket whose moments in 8 bits are updated (train.optim.adamw)
DECODED_AT_ONCE = 4 * 2**20
OFFLOAD_STAGING_BYTES = (
    4 * 32 * 2**20
)  # two buckets of gradients and two of updates (train.optim.adamw_offload)
USABLE = 0.9  # share of the device's memory that an estimate may fill


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the fullest worker of a layout."""

    state_bytes: float
    """weights, gradients, and optimizer moments where they are not offloaded"""
    gathered_bytes: float
    """weights gathered for computation under ZeRO, and gradients not yet reduced"""
    activation_bytes: float
    """activations that backward passes in flight still need"""
    update_bytes: float = 0.0
    """temporaries of the optimizer's update, after all backward passes"""
    host_state_bytes: float = 0.0
    """of the host: offloaded optimizer moments"""
    host_activation_bytes: float = 0.0
    """of the host: offloaded activations, of all micro-batches in flight"""
    kept_bytes: float = 0.0
    """of what snapshots and checkpoints hold: weights and all moments"""

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + max(self.gathered_bytes + self.activation_bytes, self.update_bytes)


def memory_estimate(job: JobConfig, layout: Layout) -> MemoryEstimate:
    """The fullest pipeline stage's memory, in bytes per worker."""
    ranks = (rank_memory(job, layout, rank, blocks_again(job, layout, rank)) for rank in range(layout.pp))
    return max(ranks, key=lambda estimate: estimate.total_bytes)


def rank_memory(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> MemoryEstimate:
    """The memory of one pipeline rank, in bytes, if ``again`` of its blocks are computed again."""
    size = STATE_BYTES[job.precision]
    sizes = sizes_of(job.model)
    stages = layout.rank_stages(rank)
    parameters = sum(stage_parameters(job.model, layout.cut, stage, layout.tp, layout.ep) for stage in stages)
    depth = sum(stage_depth(job.model, layout.cut, stage) for stage in stages)
    mine = _sharded(job, layout, parameters, depth) if layout.zero else parameters
    state, host = size * 2 * mine, 0.0  # weight and gradient
    not_kept = size * mine
    if {0, layout.stages - 1} <= set(
        stages
    ):  # the head's copy follows the embedding (parallel.pipeline.tied_embeddings)
        mine -= tied_copy(job.model, layout) / layout.shards
    state += size * MOMENTS[job.optimizer.name] * mine
    if job.optimizer.offload:
        host = size * MOMENTS[job.optimizer.name] * mine
        staging = min(OFFLOAD_STAGING_BYTES, 2 * size * mine)
        state, not_kept = state + staging - host, not_kept + staging
    held = sizes.block - sizes.experts + sizes.experts // layout.ep
    if job.optimizer.name == "muon":
        matrices = depth * (held - sizes.block + sizes.matrices) / layout.tp
        matrices = _sharded(job, layout, matrices, depth) if layout.zero else matrices
        state, mine = state - size * matrices, mine - matrices
    if job.optimizer.moments == "8bit":
        state -= 2 * (size - MOMENT_8BIT_BYTES) * mine
    block = sizes.whole_block + (held - sizes.whole_block) / layout.tp
    gathered = 0.0
    if layout.zero:
        # whole weights between forward and backward, or of the block at work and the one fetched ahead
        weights = parameters if layout.zero < 3 else 2 * block
        # gradients of a whole step, or of one block; torch's pipelines reduce once per step
        gradients = parameters if layout.zero == 1 or layout.pp > 1 else block
        gathered = (weights + gradients) * size
    at_once = min(mine, DECODED_AT_ONCE) if job.optimizer.moments == "8bit" else mine
    update = at_once * size if job.kernels.optimizer == "foreach" else 0.0  # roots of the second moments
    if job.optimizer.moments == "8bit":
        update += at_once * DECODED_BYTES
    away = offloaded_activations(job, layout, rank, again) * _in_flight(job, layout, rank)
    # error feedback of compressed gradients: the state's, and the next one (comm.reducers.feedback)
    owed = size * parameters if job.comm.gradients in COMPRESSED else 0.0
    kept = state + host - not_kept + owed
    activations = _activations(job, layout, rank, again)
    return MemoryEstimate(state + 2 * owed, gathered, activations, update, host, away, kept)


def _sharded(job: JobConfig, layout: Layout, parameters: float, depth: int) -> float:
    """This rank's parameters under ZeRO, of ``depth`` layers; experts are cut over fewer ranks."""
    sizes = sizes_of(job.model)
    experts = depth * (sizes.experts // layout.ep) / layout.tp
    return (parameters - experts) / layout.shards + experts / layout.expert_shards


def _activations(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Bytes kept for backward: every block's in flight, and on the last stage logits and their gradient.

    The linear cross-entropy has the logits of one chunk at a time. Logits are gone when a block's backward
    pass has gradients of its own.

    The schedule states how many micro-batches are in flight (``layout.schedules``). Tensor parallelism cuts
    all of it where it comes with sequence parallelism; else it is counted whole.
    """
    sizes = sizes_of(job.model)
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    kept = _kept_bytes(job, layout, rank, again)
    gradients = sizes.at_work * COMPUTE_BYTES[job.precision]
    logits = 2 * sizes.vocabulary * STATE_BYTES[job.precision] if rank == layout.last_stage_rank else 0
    cut = layout.tp if sizes.sequence_cut else 1
    at_once = min(tokens, job.kernels.loss_chunk) if job.kernels.loss == "linear" else tokens
    here = (tokens * kept + max(at_once * logits, tokens * gradients)) / cut
    weights = _joined(job, layout, rank, again) + _cast(job, layout, rank, again)
    return here + weights + _masks(job, layout, rank)


def _joined(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Bytes of weights that fused projections copy, kept for backward by every micro-batch in flight.

    Weights that lie together in memory are not copied: those without ZeRO and outside a stack of experts.
    Copies that autocast makes either way are not counted, nor those of recomputed blocks.
    """
    if job.kernels.projections != "fused" or _casts(job):
        return 0.0
    sizes = sizes_of(job.model)
    dense, experts = sizes.fused, sizes.fused_experts
    one = ((dense if layout.zero else 0) + experts / layout.ep) / layout.tp * STATE_BYTES[job.precision]
    return one * again.kept * _in_flight(job, layout, rank)


def _masks(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes of attention masks kept for backward: whole rows squared, one for all blocks of a stage.

    There is a document mask for every row and every micro-batch in flight, and one window mask. Kernels that
    are told where documents start need no mask. Where cp cuts rows, masks are made per tile and not kept.
    """
    if not attention_masks(job, layout.cp):
        return 0.0
    one = job.data.sequence_length**2 * COMPUTE_BYTES[job.precision]
    if not job.data.document_masks:
        return float(one)
    rows = layout.widest_rows(job.data.global_batch)
    return one * rows * len(layout.rank_stages(rank)) * _in_flight(job, layout, rank)


def _casts(job: JobConfig) -> bool:
    """Whether autocast makes copies of all weights for matrix products."""
    return job.precision in ("bf16", "fp16") and job.adaptive_precision.error_bound is None


def _cast(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Bytes of the weights that autocast copies: one set per forward pass, until its blocks' backward passes.

    Recomputed blocks free theirs when the forward pass ends. Under ZeRO-3 only the block at work has copies,
    besides those of fused projections (``parallel.memory.weight_casts``).
    """
    if not _casts(job):
        return 0.0
    sizes = sizes_of(job.model)
    matrices = sizes.matrices - sizes.experts + sizes.experts // layout.ep
    kept = again.kept * _in_flight(job, layout, rank)
    copies = matrices * (kept + again.repeated)
    if layout.zero == 3:
        joined = sizes.fused + sizes.fused_experts // layout.ep if job.kernels.projections == "fused" else 0
        copies = matrices + joined * kept
    head = sizes.vocabulary * sizes.hidden if rank == layout.last_stage_rank else 0
    return (copies + head) / layout.tp * COMPUTE_BYTES[job.precision]


def _kept_bytes(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Bytes per token that a rank's blocks keep for backward, of all micro-batches in flight.

    A recomputed block keeps its input, or the results of its matrix products. While its backward pass runs,
    it holds all activations of one micro-batch once more.
    """
    of, numbers = _kept_by_kind(job), _by_kind(again)
    at_work = of["kept"] if again.repeated else 0.0
    if layout.offload_activations:  # the block at work and the one that travels
        return 2 * max((of[kind] for kind, number in numbers.items() if number), default=0.0) + at_work
    held = sum(of[kind] * number for kind, number in numbers.items())
    return held * _in_flight(job, layout, rank) + at_work


def _kept_by_kind(job: JobConfig) -> dict[RecomputeKind, float]:
    """Bytes per token that a block keeps for backward, by the treatment of its activations.

    Under autocast the residual stream stays wide, and every projection casts its own input.
    """
    sizes, item = sizes_of(job.model), COMPUTE_BYTES[job.precision]
    wider = (STATE_BYTES[job.precision] - item) * sizes.hidden
    whole = sizes.activations
    if job.kernels.activation == "compiled":  # silu of the gate is computed again
        whole -= job.model.intermediate_size
    if _casts(job) and job.kernels.projections == "separate":
        whole += sizes.recast
    return {
        "kept": whole * item + 2 * wider + _routing(job) + _unfused(job),
        "full": sizes.hidden * item + wider,
        "selective": sizes.products * item + wider,
    }


def _routing(job: JobConfig) -> int:
    """Further bytes per token that a mixture keeps.

    They are the tokens' routes, the weighted results, and under autocast a wide input of the router.
    """
    moe = job.model.moe
    if not moe.experts:
        return 0
    indices = 8 * (4 * moe.top_k + moe.experts)
    wide = job.model.hidden_size * (moe.top_k + _casts(job))
    return indices + wide * STATE_BYTES[job.precision]


def _unfused(job: JobConfig) -> float:
    """Further bytes per token that a block keeps on CPUs.

    Torch's RMSNorm has no kernel there and keeps its scaled input. The result of attention is copied into
    rows for the output projection.
    """
    model = job.model
    if job.cluster.device != "cpu" or model.builder is not None:
        return 0.0
    closed = norm_kernel(job, "cpu") == "closed-form"
    normed = 0 if closed else sizes_of(model).rms_normed
    return normed * STATE_BYTES[job.precision] + model.query_width * COMPUTE_BYTES[job.precision]


def _by_kind(again: RecomputedBlocks) -> dict[RecomputeKind, int]:
    return {"kept": again.kept, "full": again.full, "selective": again.selective}


def offloaded_activations(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Bytes that a pipeline rank's blocks send to the host, and get back, per micro-batch."""
    if not layout.offload_activations:
        return 0.0
    of = _kept_by_kind(job)
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    cut = layout.tp if sizes_of(job.model).sequence_cut else 1
    held = sum(of[kind] * number for kind, number in _by_kind(again).items())
    return tokens * held / cut


def budget_bytes(job: JobConfig, device_bytes: float, limit_bytes: float = 0.0) -> float:
    """The largest estimate that a device of ``device_bytes`` allows; at most ``limit_bytes``, if not 0."""
    asked = job.layout.memory_budget_gib
    most = min(USABLE * device_bytes, limit_bytes or float("inf"))
    return most if asked is None else min(most, asked * 2**30)


def _in_flight(job: JobConfig, layout: Layout, rank: int) -> float:
    if layout.pp == 1:
        return 1.0
    schedule = schedule_of(layout.schedule, job.layout.actions)
    return schedule.in_flight(layout.pipeline_shape(job.data.global_batch), rank)
