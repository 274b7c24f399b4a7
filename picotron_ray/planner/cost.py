"""Step cost model: seconds per optimizer step of a layout, from arithmetic, bubble and communication.

    step = (m + w) · (slowest rank's arithmetic, and what it repeats, and collectives in its blocks
                      per micro-batch, + the stage-to-stage hops there and back)
           +  gradient reduction that nothing hides  +  the optimizer  +  one exchange

with m micro-batches and w micro-batches of waiting, which the schedule states (``layout.schedules``). Every
replica runs m micro-batches of ``micro_batch`` rows: each is as slow as the fullest one. Arithmetic is
`block_cost`'s; what overlaps, the software's profile says. ``plan --validate`` compares published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks, RecomputeKind
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.block_cost import block_times, head_s
from picotron_ray.planner.comm_cost import (
    context_passes,
    expert_passes,
    group_link,
    hidden_bytes,
    link,
    micro_batch_tokens,
    pass_s,
    stream_width,
    tensor_passes,
)
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.kept_activations import STATE_BYTES, weight_bytes
from picotron_ray.planner.model_sizes import (
    blocks_again,
    padded_elements,
    rank_depths,
    remember_latest,
    sizes_of,
    stage_parameters,
    tied_copy,
)
from picotron_ray.planner.narrow_gathers import saved_of_rank
from picotron_ray.planner.offload_cost import offload_s
from picotron_ray.planner.sent_bytes import end_units, kept_at_ends, reduced_bytes, weight_gathers

BUCKET_BYTES = 25e6  # gradients reduced per collective, where comm.bucket_mib is its default


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step, by cause."""

    compute_s: float
    """arithmetic of the slowest stage, all micro-batches, fill rows included"""
    bubble_s: float
    """waiting of the pipeline to fill and drain"""
    tensor_s: float
    """tensor- and sequence-parallel collectives"""
    context_s: float
    """keys, values and their gradients between context-parallel ranks"""
    expert_s: float
    """tokens on their way to experts and back"""
    pipeline_s: float
    """hidden states and their gradients between stages"""
    data_s: float
    """gradient reduction and ZeRO's gathering over the replicas, as far as computing does not hide them"""
    sync_s: float
    """the one exchange between all ranks at the end of a step"""
    offload_s: float = 0.0
    """to host memory and back, and what the host's cores compute there"""
    again_s: float = 0.0
    """forward passes that blocks repeat: what they add to the slowest stage"""
    optimizer_s: float = 0.0
    """reading and writing weights, gradients and moments"""

    @property
    def total_s(self) -> float:
        inside = (
            self.compute_s + self.again_s + self.bubble_s + self.tensor_s + self.context_s + self.expert_s
        )
        return inside + self.pipeline_s + self.data_s + self.sync_s + self.offload_s + self.optimizer_s


def step_cost(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...] = ()
) -> StepCost:
    """The cost of one optimizer step of ``layout``.

    Args:
        node_sizes: workers per node, in rank order; empty: all on one node. A tensor-parallel group that
            crosses nodes, and gradients between nodes, go over the slower link.
    """
    micro_batches = layout.micro_batches(job.data.global_batch)
    depth = _depth(job, layout, profile)
    compute, again = _busy(job, layout, profile, node_sizes)
    tensor, context, expert = (
        depth * passes(job, layout, profile, node_sizes).both
        for passes in (tensor_passes, context_passes, expert_passes)
    )
    hop = _hop(job, layout, profile, node_sizes)
    schedule = schedule_of(layout.schedule, job.layout.actions)
    waiting = schedule.waiting(layout.pipeline_shape(job.data.global_batch))
    bubbles = profile.passes(micro_batches, waiting) - micro_batches
    traffic = _data(job, layout, profile, node_sizes, micro_batches)
    return StepCost(
        compute_s=micro_batches * compute,
        bubble_s=bubbles * (compute + again + tensor + context + expert),
        tensor_s=micro_batches * tensor,
        context_s=micro_batches * context,
        expert_s=micro_batches * expert,
        pipeline_s=(micro_batches + waiting) * hop * profile.software.hop_exposed,
        data_s=_exposed(layout, profile, traffic, compute + again, micro_batches),
        sync_s=profile.latency_s * math.log2(layout.world_size),
        offload_s=offload_s(job, layout, profile),
        again_s=micro_batches * again,
        optimizer_s=_optimizer(job, layout, profile),
    )


def sharing_s(
    job: JobConfig,
    layout: Layout,
    profile: DeviceProfile,
    node_sizes: tuple[int, ...],
    micro_batch_s: float,
) -> float:
    """Seconds of `step_cost` that depend on how replicas share their state, activations not offloaded.

    Args:
        micro_batch_s: arithmetic of one micro-batch.
    """
    micro_batches = layout.micro_batches(job.data.global_batch)
    traffic = _data(job, layout, profile, node_sizes, micro_batches)
    exposed = _exposed(layout, profile, traffic, micro_batch_s, micro_batches)
    moments = replace(layout, offload_activations=False)
    away = offload_s(job, moments, profile) if job.optimizer.offload else 0.0
    return exposed + away + _optimizer(job, layout, profile)


def _depths(job: JobConfig, layout: Layout, profile: DeviceProfile, rank: int) -> int:
    """Layers of a pipeline rank."""
    layers, stages = sizes_of(job.model).layers, layout.stages
    if profile.software.even_stages and layers % stages == 0 and not layout.stage_blocks:
        return layers // stages * len(layout.rank_stages(rank))
    return sum(rank_depths(job, layout, rank))


class _Depths(NamedTuple):
    """Layers of a layout's pipeline ranks, as far as the slowest depends on them."""

    most: int
    last: int
    """of the rank with the last stage, which has the head too"""


def _depth_extremes(job: JobConfig, layout: Layout, profile: DeviceProfile) -> _Depths:
    return _depths_of_shape(job, _shape(layout), profile.software.even_stages)


class _Shape(NamedTuple):
    """The part of a layout that decides which layers its pipeline ranks hold."""

    pp: int
    virtual_stages: int
    schedule: str
    placement: tuple[tuple[int, ...], ...]
    stage_blocks: tuple[int, ...]


def _shape(layout: Layout) -> _Shape:
    return _Shape(layout.pp, layout.virtual_stages, layout.schedule, layout.placement, layout.stage_blocks)


@remember_latest
def _depths_of_shape(job: JobConfig, shape: _Shape, even: bool) -> _Depths:
    layout = Layout(**shape._asdict())
    habits = replace(CPU, software=replace(CPU.software, even_stages=even))
    depths = [_depths(job, layout, habits, rank) for rank in range(layout.pp)]
    return _Depths(max(depths), depths[layout.last_stage_rank])


def _depth(job: JobConfig, layout: Layout, profile: DeviceProfile) -> int:
    """Layers of the pipeline rank that has most."""
    return _depth_extremes(job, layout, profile).most


def least_arithmetic_s(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Lower bound of one micro-batch's arithmetic on the slowest rank: an even share of all of it."""
    layers = sizes_of(job.model).layers
    block_s = block_times(job, layout, profile).total
    whole = layers * (block_s + profile.kernel_s) + head_s(job, layout, profile)
    return max(whole / layout.pp, -(-layers // layout.pp) * (block_s + profile.kernel_s))


def _slowest_s(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of one micro-batch's arithmetic on the slowest pipeline rank, launches left out."""
    depths, block_s = _depth_extremes(job, layout, profile), block_times(job, layout, profile).total
    return max(depths.most * block_s, depths.last * block_s + head_s(job, layout, profile))


def slack_s(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds per micro-batch by which the slowest pipeline rank's arithmetic is longer than the first's."""
    return _slowest_s(job, layout, profile) - _rank_s(job, layout, profile, 0)


def _rank_s(job: JobConfig, layout: Layout, profile: DeviceProfile, rank: int) -> float:
    """Seconds of one micro-batch's arithmetic on a pipeline rank, launches left out."""
    seconds = _depths(job, layout, profile, rank) * block_times(job, layout, profile).total
    return seconds + (head_s(job, layout, profile) if rank == layout.last_stage_rank else 0.0)


def block_again(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...] = ()
) -> dict[RecomputeKind, float]:
    """Seconds per micro-batch that recomputing a block adds, by the treatment of its activations.

    A repeated forward pass repeats operations on single elements, which are counted by the bytes that they
    move. It repeats launches (a third of ``DeviceProfile.kernel_s``) and collectives. In full it also repeats
    the arithmetic, but the last product where the software stops before it.
    """
    software, times = profile.software, block_times(job, layout, profile)
    traffic = (tensor_passes, context_passes, expert_passes)
    seconds = sum(passes(job, layout, profile, node_sizes).again for passes in traffic) + profile.kernel_s / 3
    pointwise = times.pointwise_forward if software.pointwise else _pointwise_once(job, layout, profile)
    full = seconds + pointwise + times.products_forward + times.attention_forward
    some = seconds + pointwise
    if software.selective == "attention":
        some = times.attention_forward
    elif software.selective == "half-products":
        some += times.products_forward / 2
    return {
        "kept": 0.0,
        "int8": _packing_s(job, layout, profile),
        "selective": some,
        "full": full - (times.last_product if software.stops_early and profile.matmul_half else 0.0),
    }


PACKING_BYTES = 40
"""Moved per value that is kept in 8 bits: fp32 read twice, scaled, rounded, narrowed, and made wide again."""


def _packing_s(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of packing a block's activations into 8 bits, and of unpacking them."""
    sizes = sizes_of(job.model)
    values = micro_batch_tokens(job, layout) * sizes.activations / (layout.tp if sizes.sequence_cut else 1)
    return values * PACKING_BYTES / profile.memory_bytes_s


def _pointwise_once(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of a forward pass's operations on single elements, where they are part of ``flops``."""
    sizes = sizes_of(job.model)
    moved = micro_batch_tokens(job, layout) * sizes.pointwise * COMPUTE_BYTES[job.precision]
    return moved / (layout.tp if sizes.sequence_cut else 1) / profile.memory_bytes_s


def _busy(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> tuple[float, float]:
    """Seconds per micro-batch on the slowest rank: of arithmetic, and of recomputation on top."""
    launches = _depth(job, layout, profile) * profile.kernel_s
    if layout.recompute == "none":
        return _slowest_s(job, layout, profile) + launches, 0.0
    plain = [_rank_s(job, layout, profile, rank) for rank in range(layout.pp)]
    of = block_again(job, layout, profile, node_sizes)
    again = [_again(job, layout, profile, rank) for rank in range(layout.pp)]
    slowest = max(
        seconds + here.full * of["full"] + here.selective * of["selective"] + here.int8 * of["int8"]
        for seconds, here in zip(plain, again, strict=True)
    )
    return max(plain) + launches, slowest - max(plain)


def _again(job: JobConfig, layout: Layout, profile: DeviceProfile, rank: int) -> RecomputedBlocks:
    """Blocks that a pipeline rank computes again."""
    if layout.recompute not in ("selective", "full"):
        return blocks_again(job, layout, rank)
    depth = _depths(job, layout, profile, rank)
    return RecomputedBlocks(*((depth, 0) if layout.recompute == "full" else (0, depth)), depth)


def _hop(job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]) -> float:
    """Seconds to pass one micro-batch's hidden states to the next stages and their gradients back."""
    if layout.pp == 1:
        return 0.0
    cut = layout.tp if sizes_of(job.model).sequence_cut else 1
    hidden = stream_width(job) * hidden_bytes(job, layout) / cut
    return (
        2
        * _hops(layout.pp, layout.virtual_stages, layout.schedule, layout.placement)
        * (hidden / link(profile, len(node_sizes) > 1) + profile.latency_s)
    )


@lru_cache(maxsize=1024)
def _hops(pp: int, virtual_stages: int, schedule: str, placement: tuple[tuple[int, ...], ...]) -> int:
    return Layout(pp=pp, virtual_stages=virtual_stages, schedule=schedule, placement=placement).hops


def _data(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...], micro_batches: int
) -> float:
    """Seconds of data-parallel traffic per step, hidden or not.

    - Replicated: one all-reduce of the stage's gradients, 2·(dp - 1)/dp of their bytes.
    - ZeRO works unit by unit. Weights are gathered once per step, under ZeRO-3 as `weight_gathers` says.
      Gradients are reduced with every micro-batch, under ZeRO-1 or in a pipeline once per step.
    - Copies (HSDP) all-reduce their shards once.
    - The ends of a pipeline all-reduce the gradient of a tied embedding.
    """
    ends = 0.0
    if layout.first_stage_rank != layout.last_stage_rank:
        tied = STATE_BYTES[job.precision] * tied_copy(job.model, layout) / layout.shards
        ends = 2 * pass_s(tied, 2, 1, profile, link(profile, len(node_sizes) > 1)) if tied else 0.0
    if layout.replicas == 1:
        return ends
    padded = _depth(job, layout, profile) * padded_elements(job, layout)
    size = STATE_BYTES[job.precision] * (_most_parameters(job, layout) + padded)
    copies = layout.replicas // layout.shards
    shards_link = group_link(profile, node_sizes, layout.shards, layout.tp)
    copies_link = group_link(profile, node_sizes, copies, layout.shards * layout.tp)
    gradients, weights = _wire_shares(job, profile)
    part = size / layout.shards
    buckets = part / (BUCKET_BYTES * job.comm.bucket_mib / CommConfig().bucket_mib)
    total = 2 * pass_s(gradients * part, copies, buckets, profile, copies_link)
    if layout.zero:
        often, around = weight_gathers(job, layout, micro_batches), end_units(job, layout)
        reductions = 1 if layout.zero == 1 or layout.pp > 1 else micro_batches
        depth, over = -(-_depth(job, layout, profile) // job.comm.zero_blocks), (profile, shards_link)
        ranks = range(layout.pp)
        saved = max(saved_of_rank(job, layout, rank) for rank in ranks)
        kept = STATE_BYTES[job.precision] * min(kept_at_ends(job, layout, at, micro_batches) for at in ranks)
        gathered = weights * (size - kept / often.blocks) - saved
        calls = depth + around * often.embedding / often.blocks
        total += often.blocks * pass_s(gathered, layout.shards, calls, *over, profile.gather)
        total += reductions * pass_s(gradients * size, layout.shards, depth + around, *over, profile.scatter)
    return total + ends


def _wire_shares(job: JobConfig, profile: DeviceProfile) -> tuple[float, float]:
    """Bytes on the wire of gradients and of gathered weights, as shares of what a rank stores of them."""
    stored, software = STATE_BYTES[job.precision], profile.software
    gradients = _compressed_bytes(job.comm) or software.gradient_bytes or reduced_bytes(job)
    return gradients / stored, (software.gathered_bytes or weight_bytes(job)) / stored


def _compressed_bytes(comm: CommConfig) -> float:
    """Bytes on the wire of a gradient that is compressed to a fixed width; 0: it is not."""
    if comm.gradients == "int8":  # a scale of 4 bytes per 256 codes
        return comm.bits / 8 + 4 / 256
    return 2.0 if comm.gradients == "bf16" else 0.0


def _exposed(
    layout: Layout, profile: DeviceProfile, traffic: float, micro_batch_s: float, micro_batches: int
) -> float:
    """Seconds of data-parallel traffic that a step waits for, or computes slower by.

    FSDP hides it behind all micro-batches; a replicated model's gradients are reduced in buckets behind the
    backward pass (two thirds) of the last one.
    """
    software = profile.software
    if software.overlap == "none":
        return traffic
    behind = (
        micro_batches * micro_batch_s
        if layout.zero and software.overlap == "step"
        else (micro_batch_s * 2 / 3)
    )
    hidden = min(traffic, software.overlap_share * behind)
    return traffic - hidden + software.overlap_slowdown * hidden


def _optimizer(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of the optimizer's step on the device; ZeRO leaves each rank its shard."""
    if not profile.software.update_bytes or job.optimizer.offload:
        return 0.0
    most = _most_parameters(job, layout)
    return profile.software.update_bytes * most / layout.shards / profile.memory_bytes_s


def _most_parameters(job: JobConfig, layout: Layout) -> float:
    """Parameters of the fullest pipeline rank, without ZeRO."""
    return _parameters_of_shape(job, _shape(layout), layout.tp, layout.ep)


@remember_latest
def _parameters_of_shape(job: JobConfig, shape: _Shape, tp: int, ep: int) -> float:
    layout = Layout(**shape._asdict())
    return max(
        sum(stage_parameters(job.model, layout.cut, stage, tp, ep) for stage in layout.rank_stages(rank))
        for rank in range(layout.pp)
    )
