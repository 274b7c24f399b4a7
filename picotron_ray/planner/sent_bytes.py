"""Bytes that one rank sends in a step, by axis, as the engine's collectives and hops move them.

The dry run (`train.dry_run`) counts the same bytes operator by operator. A ring sends (n - 1)/n of the whole
buffer for a gather or a scatter, twice that for an all-reduce.
"""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.planner.kept_activations import STATE_BYTES, casts
from picotron_ray.planner.model_sizes import (
    blocks_again,
    sizes_of,
    stage_mixtures,
    stage_parameters,
    trained_of_stage,
)

AXES = ("tp", "pp", "replicas")
"""Axes that are told apart; data, context and expert parallelism share the replicas."""


def sent_bytes(job: JobConfig, layout: Layout, rank: int) -> dict[str, float]:
    """Bytes by axis of one pipeline rank, norms of gradients and other small sums left out."""
    again = blocks_again(job, layout, rank)
    micro_batches = layout.micro_batches(job.data.global_batch)
    inside = _tensor(job, layout, rank, again)
    passed = _context(job, layout, again) + _experts(job, layout, again)
    hops = _hops(job, layout, rank)
    return {
        "tp": micro_batches * inside,
        "pp": micro_batches * hops,
        "replicas": micro_batches * passed + _state(job, layout, rank, micro_batches),
    }


def _hidden(job: JobConfig, layout: Layout) -> int:
    """Values of the hidden states of one micro-batch on one context-parallel rank."""
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    return tokens * sizes_of(job.model).hidden


def stream_widths(job: JobConfig) -> tuple[int, int]:
    """Bytes of a value inside products, and of one on the residual stream."""
    item = COMPUTE_BYTES[job.precision]
    return item, STATE_BYTES[job.precision] if casts(job) else item


def _tensor(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Of a micro-batch: gathers of the wide stream and scatters of products' results, and back.

    Forward two of each in a block, backward as many the other way; repeated, but for the last scatter.
    Embedding and head have one wide gather and scatter each.
    """
    if layout.tp == 1:
        return 0.0
    item, wide = stream_widths(job)
    blocks = again.depth * (4 * wide + 4 * item) + again.repeated * (2 * wide + item)
    ends = (rank == layout.first_stage_rank) + (rank == layout.last_stage_rank)
    return _hidden(job, layout) * (blocks + 2 * wide * ends) * (layout.tp - 1) / layout.tp


def _hops(job: JobConfig, layout: Layout, rank: int) -> float:
    """Of a micro-batch: outputs to the next stages, and gradients to those before, on other ranks."""
    if layout.pp == 1:
        return 0.0
    stages = layout.rank_stages(rank)
    mine = set(stages)
    after = sum(stage + 1 < layout.stages and stage + 1 not in mine for stage in stages)
    before = sum(stage > 0 and stage - 1 not in mine for stage in stages)
    cut = layout.tp if sizes_of(job.model).sequence_cut else 1
    return _hidden(job, layout) * stream_widths(job)[1] * (after + before) / cut


def exchanged_width(job: JobConfig) -> int:
    """Values of a token that Ulysses exchanges in a block: queries, keys, values and results."""
    return 2 * job.model.query_width + 2 * job.model.key_width


def _context(job: JobConfig, layout: Layout, again: RecomputedBlocks) -> float:
    """Of a micro-batch: keys and values forward and backward, and their gradients; or heads that change."""
    if layout.cp == 1:
        return 0.0
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    others, item = layout.cp - 1, COMPUTE_BYTES[job.precision]
    if layout.context == "ulysses":
        one = tokens * exchanged_width(job) / layout.tp * others / layout.cp * item
        return one * (2 * again.depth + again.repeated)
    values = tokens * 2 * job.model.key_width / layout.tp * item
    back = layout.cp if layout.context == "ring" else others
    return values * (again.depth * (2 * others + back) + again.repeated * others)


def _experts(job: JobConfig, layout: Layout, again: RecomputedBlocks) -> float:
    """Of a micro-batch: rows to their experts and back, forward and backward."""
    routed = sizes_of(job.model).routed
    if layout.ep == 1 or not routed:
        return 0.0
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    sent = tokens * routed * COMPUTE_BYTES[job.precision] * (layout.ep - 1) / layout.ep
    return sent * (4 * again.depth + 2 * again.repeated)


def _state(job: JobConfig, layout: Layout, rank: int, micro_batches: int) -> float:
    """Of a step: gradients reduced and weights gathered over the replicas."""
    if layout.replicas == 1:
        return 0.0
    wide, sizes = STATE_BYTES[job.precision], sizes_of(job.model)
    stages = layout.rank_stages(rank)
    whole = sum(stage_parameters(job.model, layout.cut, stage, layout.tp, layout.ep) for stage in stages)
    depth = sum(stage_mixtures(job.model, layout.cut, stage) for stage in stages)
    experts = depth * (sizes.experts // layout.ep) / layout.tp
    copies = layout.replicas // layout.shards
    kinds = [trained_of_stage(job.model, layout.cut, stage) for stage in stages]
    share = sum(kind.share for kind in kinds) / len(kinds)
    times = 0.0
    if layout.zero:
        gathers = 1 if layout.zero < 3 else 2 * micro_batches
        times = gathers + share * (1 if layout.zero == 1 or layout.pp > 1 else micro_batches)
    of_experts = layout.expert_shards if layout.zero else 1
    shared = layout.replicas // layout.ep // of_experts
    return wide * (
        _moved(whole - experts, layout.shards, times, copies, share)
        + _moved(experts, of_experts, times, shared, share)
    )


def _moved(values: float, shards: int, times: float, copies: int, share: float) -> float:
    """Values sent: each gather or scatter over the shards, and one all-reduce of a shard over the copies.

    Args:
        share: of the values that are trained, whose gradients alone are summed.
    """
    return values * (times * (shards - 1) / shards + share * 2 * (copies - 1) / copies / shards)
