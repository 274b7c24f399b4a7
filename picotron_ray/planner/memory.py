"""Memory model: bytes per worker of weights, gradients, moments and activations of the largest stage.

This is an estimate. Fragmentation and the kernels' workspaces are left out, so the planner keeps a margin
(``layout.memory_margin``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from picotron_ray.config.schema.comm import COMPRESSED
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.planner.kept_activations import STATE_BYTES, in_flight, offloaded_activations
from picotron_ray.planner.memory_moments import rank_moments
from picotron_ray.planner.model_sizes import (
    blocks_again,
    expert_padding,
    remember_latest,
    sizes_of,
    stage_depth,
    stage_mixtures,
    stage_parameters,
    tied_copy,
    trained_of_stage,
)

MOMENTS = {"adamw": 2, "sgd": 0, "muon": 2}  # per parameter; muon has one of each matrix inside a block
MOMENT_8BIT_BYTES = 1 + 4 / 256
"""Of a moment in 8 bits: its code and its part of a scale. Small tensors keep wide moments, not counted."""
DECODED_BYTES = 30  # per parameter of the bucket whose moments in 8 bits are updated (train.optim.adamw)
DECODED_AT_ONCE = 4 * 2**20
OFFLOAD_STAGING_BYTES = (
    4 * 32 * 2**20
)  # two buckets of gradients and two of updates (train.optim.adamw_offload)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the fullest worker of a layout."""

    state_bytes: float
    """weights, gradients, averaged weights, and optimizer moments where they are not offloaded"""
    gathered_bytes: float
    """weights in 16 bits or gathered under ZeRO, to compute with, and gradients not yet reduced"""
    activation_bytes: float
    """activations that backward passes in flight still need"""
    update_bytes: float = 0.0
    """temporaries of the optimizer's update, after all backward passes, and weights in 16 bits that stay"""
    host_state_bytes: float = 0.0
    """of the host: offloaded optimizer moments"""
    host_activation_bytes: float = 0.0
    """of the host: offloaded activations, of all micro-batches in flight"""
    kept_bytes: float = 0.0
    """of what snapshots and checkpoints hold: weights, averaged ones too, and all moments"""

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + max(self.gathered_bytes + self.activation_bytes, self.update_bytes)


def memory_estimate(job: JobConfig, layout: Layout) -> MemoryEstimate:
    """The fullest pipeline stage's memory, in bytes per worker."""
    ranks = (rank_memory(job, layout, rank, blocks_again(job, layout, rank)) for rank in range(layout.pp))
    return max(ranks, key=lambda estimate: estimate.total_bytes)


class RankState(NamedTuple):
    """Bytes of one rank that no micro-batch changes.

    Fields:
        parameters, mine: elements of its stages, and those that ZeRO leaves it.
        depth: its blocks.
        state, update, host, kept: see `MemoryEstimate`.
    """

    parameters: float
    mine: float
    depth: int
    state: float
    update: float
    host: float
    kept: float


def rank_memory(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> MemoryEstimate:
    """The memory of one pipeline rank, in bytes, if ``again`` of its blocks are computed again."""
    found = rank_state(job, layout, rank)
    moments = rank_moments(job, layout, rank, found.depth, found.parameters, found.mine)
    peak, update = moments.peak(again), found.update + moments.copies
    away = offloaded_activations(job, layout, rank, again) * in_flight(job, layout, rank)
    return MemoryEstimate(found.state, peak.gathered, peak.activations, update, found.host, away, found.kept)


def rank_needs(job: JobConfig, layout: Layout, rank: int) -> Callable[[RecomputedBlocks], float]:
    """Total bytes of one pipeline rank by the blocks that it computes again; cheap to ask many times."""
    found = rank_state(job, layout, rank)
    moments = rank_moments(job, layout, rank, found.depth, found.parameters, found.mine)
    return lambda again: found.state + max(moments.peak(again).total, found.update + moments.copies)


def fullest_state_bytes(job: JobConfig, layout: Layout) -> float:
    """Bytes of the state alone on the fullest pipeline rank."""
    return max(rank_state(job, layout, rank).state for rank in range(layout.pp))


def end_state_bytes(job: JobConfig, layout: Layout) -> float:
    """Bytes of the state alone on the fuller one of the ranks with the first and the last stage."""
    first, last = layout.first_stage_rank, layout.last_stage_rank
    return max(rank_state(job, layout, rank).state for rank in {first, last})


def rank_state(job: JobConfig, layout: Layout, rank: int) -> RankState:
    """The state of one pipeline rank."""
    shape = (layout.pp, layout.virtual_stages, layout.schedule, layout.placement, layout.stage_blocks)
    shared = (layout.tp, layout.ep, layout.zero, layout.shards, layout.expert_shards)
    return _rank_state(job, rank, shape, shared)


@remember_latest
def _rank_state(
    job: JobConfig,
    rank: int,
    shape: tuple[int, int, str, tuple[tuple[int, ...], ...], tuple[int, ...]],
    shared: tuple[int, int, int, int, int],
) -> RankState:
    size, sizes = STATE_BYTES[job.precision], sizes_of(job.model)
    pp, virtual_stages, schedule, placement, stage_blocks = shape
    tp, ep, zero, shards, _ = shared
    layout = Layout(
        pp=pp,
        tp=tp,
        virtual_stages=virtual_stages,
        schedule=schedule,
        placement=placement,
        stage_blocks=stage_blocks,
    )
    stages = layout.rank_stages(rank)
    parameters = sum(stage_parameters(job.model, layout.cut, stage, tp, ep) for stage in stages)
    depth = sum(stage_depth(job.model, layout.cut, stage) for stage in stages)
    mixtures = sum(stage_mixtures(job.model, layout.cut, stage) for stage in stages)
    whole_mine = mine = _sharded(job, shared, parameters, mixtures) if zero else parameters
    kinds = [trained_of_stage(job.model, layout.cut, stage) for stage in stages]
    share, added = (sum(numbers) / len(kinds) for numbers in zip(*kinds, strict=True))
    state, host = size * mine * (1 + added + share), 0.0  # weight and gradient
    not_kept = size * mine * share
    frozen_mine = mine * (1 - share)
    if {0, layout.stages - 1} <= set(stages):
        # the head's copy follows the embedding (parallel.pipeline.tied_embeddings)
        mine -= tied_copy(job.model, layout) / shards
    mine = max(0.0, mine - frozen_mine)  # moments are of what is trained
    state += size * (MOMENTS[job.optimizer.name] + averages(job)) * mine
    if job.optimizer.offload:
        host = size * MOMENTS[job.optimizer.name] * mine
        staging = min(OFFLOAD_STAGING_BYTES, 2 * size * mine)
        state, not_kept = state + staging - host, not_kept + staging
    if job.optimizer.name == "muon":
        held = sizes.block - sizes.experts + sizes.experts // ep
        matrices = mixtures * (held - sizes.block + sizes.matrices) / tp
        matrices += (depth - mixtures) * sizes.first_matrices / tp
        matrices *= share
        matrices = _sharded(job, shared, matrices, mixtures) if zero else matrices
        state, mine = state - size * matrices, mine - matrices
    if job.optimizer.moments == "8bit":
        state -= 2 * (size - MOMENT_8BIT_BYTES) * mine
    # error feedback of compressed gradients: the state's, and the next one (comm.reducers.feedback)
    owed = size * parameters if job.comm.gradients in COMPRESSED else 0.0
    return RankState(
        parameters=parameters,
        mine=whole_mine,
        depth=depth,
        state=state + 2 * owed,
        update=_update_bytes(job, mine),
        host=host,
        kept=state + host - not_kept + owed,
    )


def averages(job: JobConfig) -> int:
    """Values that are kept of every weight beside its moments: its average, and its own inner rate (metasgd).

    Such a rate has moments and an average too.
    """
    average = int(job.optimizer.ema_decay is not None)
    learned = job.meta.strategy == "metasgd"
    return average + (1 + MOMENTS[job.optimizer.name] + average if learned else 0)


def _update_bytes(job: JobConfig, mine: float) -> float:
    """Bytes of the update's temporaries: roots of the second moments, decoded moments."""
    eight = job.optimizer.moments == "8bit"
    at_once = min(mine, DECODED_AT_ONCE) if eight else mine
    update = at_once * STATE_BYTES[job.precision] if job.kernels.optimizer == "foreach" else 0.0
    return update + (at_once * DECODED_BYTES if eight else 0.0)


def _sharded(job: JobConfig, shared: tuple[int, int, int, int, int], parameters: float, depth: int) -> float:
    """This rank's parameters under ZeRO; the experts of ``depth`` layers are cut over fewer ranks."""
    tp, ep, _, shards, expert_shards = shared
    experts = depth * (sizes_of(job.model).experts // ep) / tp
    padded = experts * expert_padding(job.model.moe, sizes_of(job.model).hidden, tp, ep, expert_shards)
    return (parameters - experts) / shards + padded / expert_shards


def budget_bytes(job: JobConfig, device_bytes: float, limit_bytes: float = 0.0) -> float:
    """The largest estimate that a device of ``device_bytes`` allows; at most ``limit_bytes``, if not 0."""
    asked = job.layout.memory_budget_gib
    most = min((1 - job.layout.memory_margin) * device_bytes, limit_bytes or float("inf"))
    return most if asked is None else min(most, asked * 2**30)
