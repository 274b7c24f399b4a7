"""Communication cost of one block and micro-batch: tensor, context and expert parallelism, in seconds."""

from __future__ import annotations

import math
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.experts import rows_sent
from picotron_ray.config.support.fast_path import overlap_method
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.device_profile import HALF_A_SUM, DeviceProfile, PassCost
from picotron_ray.planner.kept_activations import stream_bytes
from picotron_ray.planner.model_sizes import sizes_of
from picotron_ray.planner.sent_bytes import exchanged_width


class PassTimes(NamedTuple):
    """Seconds of one block and micro-batch."""

    both: float
    """forward and backward"""
    again: float
    """a forward pass repeated within the backward pass, up to the last tensor that is kept"""


NOTHING = PassTimes(0.0, 0.0)


def tensor_passes(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> PassTimes:
    """Tensor-parallel traffic.

    With sequence parallelism each block all-gathers and reduce-scatters twice forward and twice backward: 8
    collectives of (tp - 1)/tp of the hidden states (Korthikanti et al. 2022). The four all-reduces without it
    move as much. A repeated forward pass leaves out the last collective, of whose result nothing is kept.

    ``kernels.tp_overlap`` gathers again for the backward pass, once per module. Each of its collectives is tp
    - 1 transfers. Its last sum is one operation with the product before it, whose input is kept, so a
    repeated forward pass runs it too. On CPUs, whose cores copy what travels, nothing is hidden. On CUDA as
    much is taken for hidden as it adds: a plan neither gains nor loses time by it.

    Half of them move the residual stream in its own type (`planner.sent_bytes`).
    """
    if layout.tp == 1:
        return NOTHING
    wider = (1 + stream_width(job)) / 2
    moved = wider * hidden_bytes(job, layout) * (layout.tp - 1) / layout.tp
    bytes_s = group_link(profile, node_sizes, layout.tp, 1)
    seconds = moved / bytes_s + profile.latency_s
    device = job.cluster.device
    if device != "cuda" and overlap_method(job, device, layout) != "none":
        parted = seconds + (layout.tp - 2) * profile.latency_s
        if job.model.moe.experts:  # attention alone
            return PassTimes(5 * parted + 4 * seconds, 2 * parted + seconds)
        return PassTimes(10 * parted, 4 * parted)
    if not sizes_of(job.model).sequence_cut:
        return PassTimes(8 * seconds, 2 * seconds)
    gather, scatter = (
        moved / bytes_s * how.per_byte + profile.latency_s * how.latency
        for how in (profile.gather, profile.scatter)
    )
    return PassTimes(4 * (gather + scatter), 2 * gather + scatter)


def context_passes(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> PassTimes:
    """Context-parallel traffic.

    The keys and values of the other ranks arrive once forward and once backward, and their gradients go back.
    The ring sends part by part and calls its kernel once per part; the all-gather calls it twice. A block's
    ``kernel_s`` bounds what another call costs, a third of it forward. Ulysses exchanges queries, keys and
    values, and then results: two all-to-alls forward and two backward.
    """
    if layout.cp == 1:
        return NOTHING
    others, item = layout.cp - 1, COMPUTE_BYTES[job.precision]
    crosses = any(size % (layout.cp * layout.tp) for size in node_sizes)
    if layout.context == "ulysses":
        moved = micro_batch_tokens(job, layout) * exchanged_width(job) / layout.tp * others / layout.cp
        once = moved * item / link(profile, crosses) + 2 * math.log2(layout.cp) * profile.latency_s
        return PassTimes(2 * once, once)
    elements = others * micro_batch_tokens(job, layout) * 2 * job.model.key_width / layout.tp
    calls = (others if layout.context == "ring" else math.log2(layout.cp)) * profile.latency_s
    launches = (others if layout.context == "ring" else 1) * profile.kernel_s
    forward = elements * item / link(profile, crosses) + calls + launches / 3
    backward = elements * 2 * item / link(profile, crosses) + 2 * calls
    return PassTimes(forward + backward + launches * 2 / 3, forward)


def expert_passes(
    job: JobConfig, layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...]
) -> PassTimes:
    """Expert-parallel traffic.

    Tokens go to their experts and come back, forward and backward: 4 all-to-alls, of which (ep - 1)/ep leave
    the rank, and one of the counts. The rows that come back are kept, to be weighted.
    """
    sizes = sizes_of(job.model)
    if layout.ep == 1 or not sizes.routed:
        return NOTHING
    rows = micro_batch_tokens(job, layout) * rows_sent(job, layout.ep, layout.cp)
    sent = rows * sizes.routed * COMPUTE_BYTES[job.precision]
    moved = sent * (layout.ep - 1) / layout.ep
    crosses = any(size % (layout.ep * layout.tp) for size in node_sizes)
    seconds, call = moved / link(profile, crosses), math.log2(layout.ep) * profile.latency_s
    return PassTimes(4 * seconds + 5 * call, 2 * seconds + 3 * call)


def micro_batch_tokens(job: JobConfig, layout: Layout) -> int:
    """Tokens of a micro-batch on one context-parallel rank."""
    return layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp


def hidden_bytes(job: JobConfig, layout: Layout) -> int:
    """Bytes of the hidden states of one micro-batch on one context-parallel rank."""
    return micro_batch_tokens(job, layout) * sizes_of(job.model).hidden * COMPUTE_BYTES[job.precision]


def stream_width(job: JobConfig) -> float:
    """Bytes of a value on the residual stream, as a multiple of one inside products."""
    return stream_bytes(job) / COMPUTE_BYTES[job.precision]


def link(profile: DeviceProfile, between_nodes: bool) -> float:
    """Bytes per second between workers of one node, or of several."""
    return (between_nodes and profile.node_link_bytes_s) or profile.link_bytes_s


def group_link(profile: DeviceProfile, node_sizes: tuple[int, ...], ranks: int, stride: int) -> float:
    """Bytes per second and rank of a collective over ``ranks`` that lie ``stride`` apart.

    Between nodes every rank of a group sends through its own network card, and a ring enters and leaves each
    node once. So the members that share a node share its traffic: the link is as many times as fast, at most
    as fast as inside the node.
    """
    if len(node_sizes) < 2 or all(size % (ranks * stride) == 0 for size in node_sizes):
        return profile.link_bytes_s
    if not profile.node_link_bytes_s:
        return profile.link_bytes_s
    over = (size % (ranks * stride) for size in node_sizes)
    together = min(max(1, left // stride) for left in over if left)
    return min(profile.link_bytes_s, together * profile.node_link_bytes_s)


def pass_s(
    size: float,
    ranks: int,
    calls: float,
    profile: DeviceProfile,
    bytes_s: float,
    how: PassCost = HALF_A_SUM,
) -> float:
    """Seconds of a reduce-scatter or an all-gather of ``size`` bytes, or of half an all-reduce."""
    if ranks == 1:
        return 0.0
    moved = size * (ranks - 1) / ranks
    latency = max(1.0, calls) * math.log2(ranks) * profile.latency_s
    return moved / bytes_s * how.per_byte + latency * how.latency
