"""Bytes that one rank sends in a step, by axis, as the engine's collectives and hops move them.

The dry run (`train.dry_run`) counts the same bytes operator by operator. A ring sends (n - 1)/n of the whole
buffer for a gather or a scatter, twice that for an all-reduce.
"""

from __future__ import annotations

from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.experts import rows_sent
from picotron_ray.config.support.fast_path import overlap_method
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.planner.kept_activations import STATE_BYTES, stream_bytes, weight_bytes
from picotron_ray.planner.model_sizes import (
    blocks_again,
    end_parameters,
    expert_padding,
    mixtures_again,
    sizes_of,
    stage_mixtures,
    stage_parameters,
    tied_copy,
    trained_of_stage,
    trains_embedding,
)
from picotron_ray.planner.narrow_gathers import saved_of_rank

AXES = ("tp", "pp", "replicas")
"""Axes that are told apart; data, context and expert parallelism share the replicas."""


def sent_bytes(job: JobConfig, layout: Layout, rank: int) -> dict[str, float]:
    """Bytes by axis of one pipeline rank, norms of gradients and other small sums left out."""
    again, mixtures = blocks_again(job, layout, rank), mixtures_again(job, layout, rank)
    micro_batches = layout.micro_batches(job.data.global_batch)
    inside = _tensor(job, layout, rank, again)
    passed = _context(job, layout, again) + _experts(job, layout, mixtures)
    hops = _hops(job, layout, rank)
    return {
        "tp": micro_batches * inside,
        "pp": micro_batches * hops + _tied(job, layout, rank),
        "replicas": micro_batches * passed + _state(job, layout, rank, micro_batches),
    }


def _hidden(job: JobConfig, layout: Layout) -> int:
    """Values of the hidden states of one micro-batch on one context-parallel rank."""
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    return tokens * sizes_of(job.model).hidden


def stream_widths(job: JobConfig) -> tuple[int, int]:
    """Bytes of a value inside products, and of one on the residual stream."""
    return COMPUTE_BYTES[job.precision], stream_bytes(job)


def _tensor(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Of a micro-batch: gathers of the residual stream and scatters of products' results, and back.

    Forward two of each in a block, backward as many the other way; repeated, but for the last scatter.
    Embedding and head have one gather and scatter of the stream each. Overlapped ones (not those of experts)
    are cast before they travel, gather again for the backward pass, and are repeated whole.
    """
    if layout.tp == 1:
        return 0.0
    item, wide = stream_widths(job)
    blocks = again.depth * (4 * wide + 4 * item) + again.repeated * (2 * wide + item)
    if overlap_method(job, job.cluster.device, layout) != "none":
        half = (5 * item, 2 * item)
        rest = (2 * wide + 2 * item, wide) if job.model.moe.experts else half
        blocks = again.depth * (half[0] + rest[0]) + again.repeated * (half[1] + rest[1])
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


def _tied(job: JobConfig, layout: Layout, rank: int) -> float:
    """Of a step: the reduced gradient of a tied embedding, from either end to the other on another rank."""
    first, last = layout.first_stage_rank, layout.last_stage_rank
    if first == last or rank not in (first, last) or not trains_embedding(job.model):
        return 0.0
    shards = layout.shards if layout.zero else 1
    return tied_copy(job.model, layout) / shards * STATE_BYTES[job.precision]


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


def _experts(job: JobConfig, layout: Layout, mixtures: RecomputedBlocks) -> float:
    """Of a micro-batch: rows to their experts and back, forward and backward, of blocks that have experts."""
    routed = sizes_of(job.model).routed
    if layout.ep == 1 or not routed:
        return 0.0
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    rows = tokens * rows_sent(job, layout.ep, layout.cp)
    sent = rows * routed * COMPUTE_BYTES[job.precision] * (layout.ep - 1) / layout.ep
    return sent * (4 * mixtures.depth + 2 * mixtures.repeated)


def _state(job: JobConfig, layout: Layout, rank: int, micro_batches: int) -> float:
    """Of a step: gradients reduced and weights gathered over the replicas."""
    if layout.replicas == 1:
        return 0.0
    sizes = sizes_of(job.model)
    stages = layout.rank_stages(rank)
    whole = sum(stage_parameters(job.model, layout.cut, stage, layout.tp, layout.ep) for stage in stages)
    depth = sum(stage_mixtures(job.model, layout.cut, stage) for stage in stages)
    experts = depth * (sizes.experts // layout.ep) / layout.tp
    copies = layout.replicas // layout.shards
    kinds = [trained_of_stage(job.model, layout.cut, stage) for stage in stages]
    share = sum(kind.share for kind in kinds) / len(kinds)
    wide, each, saved = STATE_BYTES[job.precision], 0.0, 0.0
    if layout.zero:
        gathers = weight_gathers(job, layout, micro_batches).blocks
        scatters = share * (1 if layout.zero == 1 or layout.pp > 1 else micro_batches)
        each = gathers * weight_bytes(job) + scatters * reduced_bytes(job)
        kept = weight_bytes(job) * kept_at_ends(job, layout, rank, micro_batches)
        saved = (gathers * saved_of_rank(job, layout, rank) + kept) * (layout.shards - 1) / layout.shards
    of_experts = layout.expert_shards if layout.zero else 1
    padding = expert_padding(job.model.moe, sizes.hidden, layout.tp, layout.ep, of_experts)
    shared = layout.replicas // layout.ep // of_experts
    return (
        _moved(whole - experts, layout.shards, each, copies, share * wide)
        + _moved(experts * padding, of_experts, each, shared, share * wide)
        - saved
    )


class WeightGathers(NamedTuple):
    """Times that ZeRO gathers weights in a step, by unit."""

    blocks: int
    embedding: int
    head: int


def weight_gathers(job: JobConfig, layout: Layout, micro_batches: int) -> WeightGathers:
    """Times that ZeRO gathers what it shards; see `parallel.data.fsdp`.

    ZeRO-3 gathers a block for each forward and each backward pass, embedding and head once per micro-batch.
    In a pipeline weights stay after a backward pass, so that the next pass finds them, and the head stays
    from its first pass on. So does the embedding of a model of the user's own, which is in the root's unit.
    """
    if layout.zero < 3:
        return WeightGathers(1, 1, 1)
    if layout.pp == 1:
        return WeightGathers(2 * micro_batches, micro_batches, micro_batches)
    return WeightGathers(micro_batches + 1, micro_batches if job.model.builder is None else 1, 1)


def in_root(job: JobConfig, layout: Layout) -> bool:
    """Whether what stands around the blocks is one unit, the root's (`parallel.data.fsdp`)."""
    return job.model.builder is not None or (layout.stages == 1 and bool(sizes_of(job.model).tied))


def end_units(job: JobConfig, layout: Layout) -> int:
    """Units that ZeRO gathers beside blocks, on the rank that has most: embedding and head, or the root."""
    both = layout.first_stage_rank == layout.last_stage_rank
    return 2 if both and not (layout.stages == 1 and in_root(job, layout)) else 1


def kept_at_ends(job: JobConfig, layout: Layout, rank: int, micro_batches: int) -> float:
    """Weights of embedding and head that a step would gather more if it gathered them as often as blocks."""
    gathers = weight_gathers(job, layout, micro_batches)
    ends = [end_parameters(job.model, layout.cut, stage, layout.tp) for stage in layout.rank_stages(rank)]
    return sum(
        (gathers.blocks - gathers.embedding) * end.embedding + (gathers.blocks - gathers.head) * end.head
        for end in ends
    )


def reduced_bytes(job: JobConfig) -> int:
    """Bytes of a gradient as ZeRO sends it to be summed."""
    return 2 if job.comm.reduce_dtype == "bf16" else STATE_BYTES[job.precision]


def _moved(values: float, shards: int, each: float, copies: int, summed: float) -> float:
    """Bytes sent: gathers and scatters over the shards, and one all-reduce of a shard over the copies.

    Args:
        each: bytes of a value, in all gathers and scatters together.
        summed: bytes of its gradient in the all-reduce; of what is not trained 0.
    """
    return values * (each * (shards - 1) / shards + summed * 2 * (copies - 1) / copies / shards)
