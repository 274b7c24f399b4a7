"""Seconds per optimizer step of a layout, by a simple stated cost: arithmetic, bubble and communication.

    step = (m + w) · (slowest rank's arithmetic and tensor-parallel traffic per micro-batch
                      + the stage-to-stage hops there and back)  +  gradient reduction  +  one exchange

with m micro-batches and w = (pp - 1) / stages per rank of waiting, a third of pp - 1 where the schedule fills
the wait with gradients of weights (``config.schedules``), and what running through it in unit times gives for
a schedule of the user's own (``config.actions``). Because every replica runs m micro-batches of
``micro_batch`` rows, the imbalance of rows (11, 11, 10 of 32) and the fill rows are counted: a replica is as
slow as the fullest one. Nothing overlaps, which flatters no layout: it ranks layouts and predicts no MFU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.recompute import recomputed
from picotron_ray.config.schedules import rules_of, waits
from picotron_ray.planner.counts import (
    sizes_of,
    stage_bounds,
    stage_depth,
    stage_flops_per_token,
    stage_parameters,
)
from picotron_ray.planner.memory import COMPUTE_BYTES, STATE_BYTES, memory_estimate, offloaded_activations
from picotron_ray.planner.profile import DeviceProfile

BUCKET_BYTES = 25e6  # gradients reduced per collective
# Arithmetic lost to thinner matrices per doubling of tp. Megatron-LM (Shoeybi et al. 2019) kept 77 % at
# 8-way, its collectives included.
TENSOR_LOSS = 0.1


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
    """gradient reduction and ZeRO's gathering over the replicas"""
    sync_s: float
    """the one exchange between all ranks at the end of a step"""
    offload_s: float = 0.0
    """to host memory and back, and what the host's cores compute there"""

    @property
    def total_s(self) -> float:
        inside = self.compute_s + self.bubble_s + self.tensor_s + self.context_s + self.expert_s
        return inside + self.pipeline_s + self.data_s + self.sync_s + self.offload_s


def step_cost(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...] = ()
) -> StepCost:
    """The cost of one optimizer step of ``layout``.

    Args:
        node_sizes: workers per node, in rank order; empty: all on one node. A tensor-parallel group that
            crosses nodes, and gradients between nodes, go over the slower link.
    """
    micro_batches = layout.micro_batches(job.data.global_batch)
    compute = _stage_compute(job, layout, profile)
    tensor = _tensor(job, layout, profile, node_sizes)
    context = _context(job, layout, profile, node_sizes)
    expert = _expert(job, layout, profile, node_sizes)
    hop = _hop(job, layout, profile, node_sizes)
    waiting = waits(rules_of(layout.schedule, job.layout.actions), layout.pp, layout.virtual_stages)
    return StepCost(
        compute_s=micro_batches * compute,
        bubble_s=waiting * (compute + tensor + context + expert),
        tensor_s=micro_batches * tensor,
        context_s=micro_batches * context,
        expert_s=micro_batches * expert,
        pipeline_s=(micro_batches + waiting) * hop,
        data_s=_data(job, layout, profile, node_sizes, micro_batches),
        sync_s=profile.latency_s * math.log2(layout.world_size),
        offload_s=_offload(job, layout, profile),
    )


def _depth(job: JobConfig, layout: Layout) -> int:
    """Layers of the pipeline rank that has most."""
    depths = [end - start for start, end in stage_bounds(job.model, layout.stages)]
    return max(sum(depths[stage] for stage in layout.rank_stages(rank)) for rank in range(layout.pp))


def _stage_compute(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of arithmetic per micro-batch on the slowest pipeline rank."""
    tokens = layout.micro_batch * job.data.sequence_length // layout.cp
    flops = max(_flops(job, layout, rank) for rank in range(layout.pp))
    flops += max(_flops_again(job, layout, rank) for rank in range(layout.pp))
    blocks = _depth(job, layout)
    loss = 1 + TENSOR_LOSS * math.log2(layout.tp)
    return loss * tokens * flops / profile.flops + blocks * profile.kernel_s


def _flops(job: JobConfig, layout: Layout, rank: int) -> float:
    """FLOPs per token of a pipeline rank; the linear cross-entropy does the head's product once more."""
    total = sum(
        stage_flops_per_token(job.model, job.data.sequence_length, layout.stages, stage, layout.tp)
        for stage in layout.rank_stages(rank)
    )
    if job.kernels.loss == "linear" and rank == layout.last_stage_rank:
        sizes = sizes_of(job.model)
        total += 2 * sizes.vocabulary * sizes.hidden / layout.tp
    return total


def _flops_again(job: JobConfig, layout: Layout, rank: int) -> float:
    """FLOPs per token of forward passes that a pipeline rank repeats: a third of a block's each."""
    if layout.recompute == "none":
        return 0.0
    sizes = sizes_of(job.model)
    attention = 12 * sizes.scores * job.data.sequence_length
    block = (6 * (sizes.block - sizes.idle) + attention) / layout.tp
    kinds = [
        kind
        for stage in layout.rank_stages(rank)
        for kind in recomputed(layout.recompute, stage_depth(job.model, layout.stages, stage))
    ]
    return block / 3 * kinds.count("full")


def _tensor(job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]) -> float:
    """Seconds of tensor-parallel traffic per micro-batch and stage.

    With sequence parallelism each block all-gathers and reduce-scatters twice forward and twice backward: 8
    collectives of (tp - 1)/tp of the hidden states (Korthikanti et al. 2022). The four all-reduces without it
    move as much.
    """
    if layout.tp == 1:
        return 0.0
    hidden = _hidden_bytes(job, layout)
    crosses = any(size % layout.tp for size in node_sizes)
    seconds = hidden * (layout.tp - 1) / layout.tp / _link(profile, crosses) + profile.latency_s
    return 8 * _depth(job, layout) * seconds


def _context(job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]) -> float:
    """Seconds of context-parallel traffic per micro-batch and stage.

    Per block the keys and values of the other ranks pass by once forward and once backward, and their
    gradients (in fp32 or wider) come back. The ring sends part by part and calls its kernel once per part, in
    both directions; the all-gather pays for its collectives.
    """
    if layout.cp == 1:
        return 0.0
    tokens = layout.micro_batch * job.data.sequence_length // layout.cp
    width = 2 * job.model.key_width / layout.tp
    moved = 2 * COMPUTE_BYTES[job.precision] + STATE_BYTES[job.precision]
    crosses = any(size % (layout.cp * layout.tp) for size in node_sizes)
    others = layout.cp - 1
    seconds = others * tokens * width * moved / _link(profile, crosses)
    calls = 3 * others if layout.context == "ring" else 3 * math.log2(layout.cp)
    return _depth(job, layout) * (seconds + calls * profile.latency_s + 2 * others * profile.kernel_s)


def _expert(job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]) -> float:
    """Seconds of expert-parallel traffic per micro-batch and stage.

    Per block the chosen tokens go to their experts and come back, forward and backward: 4 all-to-alls of
    which (ep - 1)/ep leave the rank, and one of the counts.
    """
    sizes = sizes_of(job.model)
    if layout.ep == 1 or not sizes.routed:
        return 0.0
    tokens = layout.micro_batch * job.data.sequence_length // layout.cp
    moved = tokens * sizes.routed * COMPUTE_BYTES[job.precision] * (layout.ep - 1) / layout.ep
    crosses = any(size % (layout.ep * layout.tp) for size in node_sizes)
    calls = 5 * math.log2(layout.ep) * profile.latency_s
    return _depth(job, layout) * (4 * moved / _link(profile, crosses) + calls)


def _hidden_bytes(job: JobConfig, layout: Layout) -> int:
    """Bytes of the hidden states of one micro-batch on one context-parallel rank."""
    tokens = layout.micro_batch * job.data.sequence_length // layout.cp
    return tokens * sizes_of(job.model).hidden * COMPUTE_BYTES[job.precision]


def _hop(job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]) -> float:
    """Seconds to pass one micro-batch's hidden states to the next stages and their gradients back."""
    if layout.pp == 1:
        return 0.0
    hidden = _hidden_bytes(job, layout) / (layout.tp if sizes_of(job.model).sequence_cut else 1)
    return 2 * layout.hops * (hidden / _link(profile, len(node_sizes) > 1) + profile.latency_s)


def _data(
    job: JobConfig,
    layout: Layout,
    profile: DeviceProfile,
    node_sizes: tuple[int, ...],
    micro_batches: int,
) -> float:
    """Seconds of data-parallel traffic per step.

    Replicated: one all-reduce of the stage's gradients, 2·(dp - 1)/dp of their bytes. ZeRO works block by
    block: weights are gathered once per step, by ZeRO-3 twice per micro-batch, gradients reduced with every
    micro-batch, under ZeRO-1 or a pipeline once. Copies (HSDP) all-reduce their shards once.
    """
    if layout.replicas == 1:
        return 0.0
    size = STATE_BYTES[job.precision] * max(
        sum(
            stage_parameters(job.model, layout.stages, stage, layout.tp, layout.ep)
            for stage in layout.rank_stages(rank)
        )
        for rank in range(layout.pp)
    )
    between = len(node_sizes) > 1
    apart = any(nodes % (layout.shards * layout.tp) for nodes in node_sizes)  # a copy on several nodes
    copies = layout.replicas // layout.shards
    total = 2 * _pass(size / layout.shards, copies, size / layout.shards / BUCKET_BYTES, profile, between)
    if layout.zero:
        gathers = 1 if layout.zero < 3 else 2 * micro_batches
        reductions = 1 if layout.zero == 1 or layout.pp > 1 else micro_batches
        blocks = _depth(job, layout) + 2
        total += (gathers + reductions) * _pass(size, layout.shards, blocks, profile, apart)
    return total


def _offload(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of a step for what is kept in host memory.

    Moments: gradients down, updates up, AdamW by the host's cores, which read and write update and moments
    and read gradients: seven values per parameter. Activations: down and up, per micro-batch.
    """
    seconds = 0.0
    if job.optimizer.offload:
        moments = memory_estimate(job, layout).host_state_bytes
        rate = profile.host_bytes_s * max(1, int(job.cluster.cpus_per_worker))
        seconds += moments / profile.host_link_bytes_s + 3.5 * moments / rate
    if layout.offload_activations:
        most = max(offloaded_activations(job, layout, rank) for rank in range(layout.pp))
        seconds += 2 * layout.micro_batches(job.data.global_batch) * most / profile.host_link_bytes_s
    return seconds


def _pass(size: float, ranks: int, calls: float, profile: DeviceProfile, between_nodes: bool) -> float:
    """Seconds of a reduce-scatter or an all-gather of ``size`` bytes; an all-reduce is both."""
    if ranks == 1:
        return 0.0
    moved = size * (ranks - 1) / ranks
    latency = max(1.0, calls) * math.log2(ranks) * profile.latency_s
    return moved / _link(profile, between_nodes) + latency


def _link(profile: DeviceProfile, between_nodes: bool) -> float:
    return (between_nodes and profile.node_link_bytes_s) or profile.link_bytes_s
