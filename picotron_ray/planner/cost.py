"""Step cost model: seconds per optimizer step of a layout, from arithmetic, bubble and communication.

    step = (m + w) · (slowest rank's arithmetic, twice where it is repeated, and collectives in its blocks
                      per micro-batch, + the stage-to-stage hops there and back)
           +  gradient reduction  +  one exchange

with m micro-batches and w micro-batches of waiting, which the schedule states (``layout.schedules``). Every
replica runs m micro-batches of ``micro_batch`` rows. So uneven rows (11, 11, 10 of 32) and fill rows are
counted: each replica is as slow as the fullest one. No overlap is counted, for any layout: the cost ranks
layouts and does not predict MFU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputeKind
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.comm_cost import (
    context_passes,
    expert_passes,
    hidden_bytes,
    link,
    micro_batch_tokens,
    tensor_passes,
)
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.memory import STATE_BYTES, memory_estimate, offloaded_activations
from picotron_ray.planner.model_sizes import (
    blocks_again,
    sizes_of,
    stage_bounds,
    stage_flops_per_token,
    stage_parameters,
    tied_copy,
)

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
    again_s: float = 0.0
    """forward passes that blocks repeat: what they add to the slowest stage"""

    @property
    def total_s(self) -> float:
        inside = (
            self.compute_s + self.again_s + self.bubble_s + self.tensor_s + self.context_s + self.expert_s
        )
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
    depth = _depth(job, layout)
    arithmetic, again = _busy(job, layout, profile, node_sizes)
    compute = arithmetic + depth * profile.kernel_s
    tensor, context, expert = (
        depth * passes(job, layout, profile, node_sizes).both
        for passes in (tensor_passes, context_passes, expert_passes)
    )
    hop = _hop(job, layout, profile, node_sizes)
    schedule = schedule_of(layout.schedule, job.layout.actions)
    waiting = schedule.waiting(layout.pipeline_shape(job.data.global_batch))
    return StepCost(
        compute_s=micro_batches * compute,
        bubble_s=waiting * (compute + again + tensor + context + expert),
        tensor_s=micro_batches * tensor,
        context_s=micro_batches * context,
        expert_s=micro_batches * expert,
        pipeline_s=(micro_batches + waiting) * hop,
        data_s=_data(job, layout, profile, node_sizes, micro_batches),
        sync_s=profile.latency_s * math.log2(layout.world_size),
        offload_s=_offload(job, layout, profile),
        again_s=micro_batches * again,
    )


def _depth(job: JobConfig, layout: Layout) -> int:
    """Layers of the pipeline rank that has most."""
    depths = [end - start for start, end in stage_bounds(job.model, layout.stages)]
    return max(sum(depths[stage] for stage in layout.rank_stages(rank)) for rank in range(layout.pp))


def _arithmetic(job: JobConfig, layout: Layout, profile: DeviceProfile, flops: float) -> float:
    """Seconds of so many FLOPs per token of a micro-batch."""
    loss = 1 + TENSOR_LOSS * math.log2(layout.tp)
    return loss * micro_batch_tokens(job, layout) * flops / profile.flops


def arithmetic_s(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of one micro-batch's arithmetic on the slowest rank, launches included."""
    busy = max(_arithmetic(job, layout, profile, _flops(job, layout, rank)) for rank in range(layout.pp))
    return busy + _depth(job, layout) * profile.kernel_s


def _flops(job: JobConfig, layout: Layout, rank: int) -> float:
    """FLOPs per token of a pipeline rank. The linear cross-entropy adds one more product of the head."""
    total = sum(
        stage_flops_per_token(job.model, job.data.sequence_length, layout.stages, stage, layout.tp)
        for stage in layout.rank_stages(rank)
    )
    if job.kernels.loss == "linear" and rank == layout.last_stage_rank:
        sizes = sizes_of(job.model)
        total += 2 * sizes.vocabulary * sizes.hidden / layout.tp
    return total


def block_again(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...] = ()
) -> dict[RecomputeKind, float]:
    """Seconds per micro-batch that recomputing a block adds, by the treatment of its activations.

    A repeated forward pass repeats operations on single elements, which are counted by the bytes that they
    move. It repeats launches (a third of ``DeviceProfile.kernel_s``) and collectives. In full it also repeats
    the arithmetic, a third of a block's.
    """
    sizes, cut = sizes_of(job.model), layout.tp if sizes_of(job.model).sequence_cut else 1
    moved = micro_batch_tokens(job, layout) * sizes.pointwise * COMPUTE_BYTES[job.precision] / cut
    traffic = (tensor_passes, context_passes, expert_passes)
    seconds = sum(passes(job, layout, profile, node_sizes).again for passes in traffic)
    seconds += moved / profile.memory_bytes_s + profile.kernel_s / 3
    attention = 4 * sizes.scores * job.data.sequence_length
    flops = (2 * (sizes.block - sizes.idle) + attention) / layout.tp
    return {
        "kept": 0.0,
        "selective": seconds,
        "full": seconds + _arithmetic(job, layout, profile, flops),
    }


def _busy(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> tuple[float, float]:
    """Seconds per micro-batch on the slowest rank: of arithmetic, and of recomputation on top."""
    plain = [_arithmetic(job, layout, profile, _flops(job, layout, rank)) for rank in range(layout.pp)]
    if layout.recompute == "none":
        return max(plain), 0.0
    of = block_again(job, layout, profile, node_sizes)
    again = [blocks_again(job, layout, rank) for rank in range(layout.pp)]
    slowest = max(
        seconds + here.full * of["full"] + here.selective * of["selective"]
        for seconds, here in zip(plain, again, strict=True)
    )
    return max(plain), slowest - max(plain)


def _hop(job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]) -> float:
    """Seconds to pass one micro-batch's hidden states to the next stages and their gradients back."""
    if layout.pp == 1:
        return 0.0
    hidden = hidden_bytes(job, layout) / (layout.tp if sizes_of(job.model).sequence_cut else 1)
    return 2 * layout.hops * (hidden / link(profile, len(node_sizes) > 1) + profile.latency_s)


def _data(
    job: JobConfig,
    layout: Layout,
    profile: DeviceProfile,
    node_sizes: tuple[int, ...],
    micro_batches: int,
) -> float:
    """Seconds of data-parallel traffic per step.

    - Replicated: one all-reduce of the stage's gradients, 2·(dp - 1)/dp of their bytes.
    - ZeRO works block by block. Weights are gathered once per step, under ZeRO-3 twice per micro-batch.
      Gradients are reduced with every micro-batch, under ZeRO-1 or in a pipeline once per step.
    - Copies (HSDP) all-reduce their shards once.
    - The ends of a pipeline all-reduce the gradient of a tied embedding.
    """
    ends = 0.0
    if layout.first_stage_rank != layout.last_stage_rank:
        tied = STATE_BYTES[job.precision] * tied_copy(job.model, layout) / layout.shards
        ends = 2 * _pass(tied, 2, 1, profile, len(node_sizes) > 1) if tied else 0.0
    if layout.replicas == 1:
        return ends
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
    return total + ends


def _offload(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of a step for offloading to host memory.

    - Moments: gradients go down and updates come up. AdamW runs on the host's cores, which read and write
      update and moments and read gradients: seven values per parameter.
    - Activations: down and up, per micro-batch.
    """
    seconds = 0.0
    if job.optimizer.offload:
        moments = memory_estimate(job, layout).host_state_bytes
        rate = profile.host_bytes_s * max(1, int(job.cluster.cpus_per_worker))
        seconds += moments / profile.host_link_bytes_s + 3.5 * moments / rate
    if layout.offload_activations:
        most = max(
            offloaded_activations(job, layout, rank, blocks_again(job, layout, rank))
            for rank in range(layout.pp)
        )
        seconds += 2 * layout.micro_batches(job.data.global_batch) * most / profile.host_link_bytes_s
    return seconds


def _pass(size: float, ranks: int, calls: float, profile: DeviceProfile, between_nodes: bool) -> float:
    """Seconds of a reduce-scatter or an all-gather of ``size`` bytes. An all-reduce is both."""
    if ranks == 1:
        return 0.0
    moved = size * (ranks - 1) / ranks
    latency = max(1.0, calls) * math.log2(ranks) * profile.latency_s
    return moved / link(profile, between_nodes) + latency
