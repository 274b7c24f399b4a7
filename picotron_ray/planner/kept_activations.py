"""Bytes of activations that a rank's blocks keep for backward, and of the types of weights and stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.experts import rows_sent
from picotron_ray.config.support.fast_path import fuses_projections, overlap_method
from picotron_ray.config.support.kernels import attention_masks, norm_kernel, windowed
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.message_order import may_receive_early, receive_counts
from picotron_ray.layout.recompute_policy import RecomputedBlocks, RecomputeKind
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.model_sizes import sizes_of

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
ACTIVATION_8BIT_BYTES = 1 + 4 / 128
"""Of a saved activation in 8 bits: its code and its part of a scale."""
UNPACKED_AT_ONCE = 0.5
"""Share of a block's activations that its backward pass has unpacked from 8 bits at a time.

In 16 bits hidden states are unpacked in the type of their scales first, which is wide.
"""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of one block on one rank, by what becomes of its activations.

    Fields:
        kept, selective, full, int8: that it keeps for backward, of all micro-batches in flight.
        travelling: whether activations are offloaded: the block at work and the one that travels are here.
        selective_again, full_again: that its second forward pass makes anew.
        int8_again: that its backward pass has unpacked.
    """

    kept: float
    selective: float
    full: float
    int8: float
    travelling: bool
    selective_again: float
    full_again: float
    int8_again: float

    def held(self, again: RecomputedBlocks) -> float:
        """Bytes that all blocks of a rank keep for backward."""
        kinds = self._by_kind(again)
        if self.travelling:
            return 2 * max((size for number, size, _ in kinds if number), default=0.0)
        return sum(number * size for number, size, _ in kinds)

    def passes(self, again: RecomputedBlocks, flying: float) -> list[BackwardBlocks]:
        """Blocks by what they keep, in the order in which a micro-batch's backward pass comes to them.

        Where that is not known they are taken for blocks of one kind, which keep the mean and make most anew.
        """
        kinds = [(number, size, anew) for number, size, anew in self._by_kind(again) if number]
        if again.in_order and not self.travelling:
            return [BackwardBlocks(number, size / max(1.0, flying), anew) for number, size, anew in kinds]
        mean = self.held(again) / max(1, again.depth) / max(1.0, flying)
        return [BackwardBlocks(again.depth, mean, max((anew for *_, anew in kinds), default=0.0))]

    def _by_kind(self, again: RecomputedBlocks) -> tuple[tuple[int, float, float], ...]:
        """Number of blocks, what one keeps and what it makes anew; the last blocks of a stage first."""
        return (
            (again.kept, self.kept, 0.0),
            (again.int8, self.int8, self.int8_again),
            (again.selective, self.selective, self.selective_again),
            (again.full, self.full, self.full_again),
        )


class BackwardBlocks(NamedTuple):
    """Blocks of one kind as a micro-batch's backward pass comes to them: what each keeps, and makes anew."""

    number: int
    kept: float
    anew: float


def block_bytes(job: JobConfig, layout: Layout, flying: float) -> BlockBytes:
    """The bytes of one block of a layout, ``flying`` micro-batches being in flight.

    Tensor parallelism cuts all of it where it comes with sequence parallelism, but for `_whole`.
    """
    sizes, of = sizes_of(job.model), kept_by_kind(job, layout)
    cut = layout.tp if sizes.sequence_cut else 1
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    whole = {} if layout.offload_activations else _whole(job, layout)
    each = 1.0 if layout.offload_activations else flying
    unpacked = sizes.hidden * STATE_BYTES[job.precision] if narrows(job) else 0
    kept = {kind: tokens * (size / cut + whole.get(kind, 0.0)) for kind, size in of.items()}
    return BlockBytes(
        kept=kept["kept"] * each + _joined_bytes(job, layout) * flying,
        selective=kept["selective"] * each,
        full=kept["full"] * each,
        int8=kept["int8"] * each,
        travelling=layout.offload_activations,
        selective_again=kept["kept"] - kept["selective"],
        full_again=kept["kept"] - kept["full"],
        int8_again=tokens / cut * (UNPACKED_AT_ONCE * of["kept"] + unpacked),
    )


def _joined_bytes(job: JobConfig, layout: Layout) -> float:
    """Bytes of weights that fused projections copy, kept for backward by a micro-batch and block.

    Weights that lie together in memory are not copied: those without ZeRO and outside a stack of experts.
    Those of recomputed blocks are not counted.
    """
    if not fuses_projections(job, job.cluster.device, layout):
        return 0.0
    sizes = sizes_of(job.model)
    dense, experts = sizes.fused, sizes.fused_experts
    return ((dense if layout.zero else 0) + experts / layout.ep) / layout.tp * weight_bytes(job)


def _whole(job: JobConfig, layout: Layout) -> dict[RecomputeKind, float]:
    """Further bytes per token that tensor parallelism leaves whole on each rank, of a block.

    Sequence parallelism gathers the inputs of attention and of the hidden layer, which projections keep;
    overlapped products gather them again instead. Selective recomputation
    keeps what the output projections gave before it is cut. Of a mixture's experts the rows that go in and
    come out are whole.
    """
    moe, sizes, item = job.model.moe, sizes_of(job.model), COMPUTE_BYTES[job.precision]
    row = moe.top_k * sizes.hidden if moe.experts else 0
    overlaps = overlap_method(job, job.cluster.device, layout) != "none"
    inputs = 0 if overlaps else 2 * sizes.hidden
    share = 1 - 1 / layout.tp if sizes.sequence_cut else 0.0
    kept = share * (inputs + 2 * row) * item
    packed = kept / item * ACTIVATION_8BIT_BYTES
    return {"kept": kept, "selective": share * (2 * sizes.hidden + row) * item, "int8": packed}


def stage_end_bytes(job: JobConfig, layout: Layout, rank: int, flying: float) -> float:
    """Bytes of what enters and leaves stages: their outputs until backward, and buffers to receive.

    The input of a stage's first block lies in such a buffer.
    """
    hidden = _stage_output_bytes(job, layout)
    if layout.pp == 1:
        return hidden
    count, before = layout.micro_batches(job.data.global_batch), _stages_before(layout, rank)
    own = flying - min(flying, count) * before / len(layout.rank_stages(rank))
    return receive_bytes(job, layout, rank) + hidden * own


def receive_bytes(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes of the buffers that a rank receives into, as many as `receive_counts` says of its schedule."""
    if layout.pp == 1:
        return 0.0
    schedule = schedule_of(layout.schedule, job.layout.actions)
    shape = layout.pipeline_shape(job.data.global_batch)
    early = may_receive_early(job.cluster.device, layout.pp)
    return _stage_output_bytes(job, layout) * receive_counts(schedule, shape, early)[rank]


def _stage_output_bytes(job: JobConfig, layout: Layout) -> float:
    sizes = sizes_of(job.model)
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    return tokens * sizes.hidden * stream_bytes(job) / (layout.tp if sizes.sequence_cut else 1)


def _stages_before(layout: Layout, rank: int) -> int:
    """Number of stages before those of a pipeline rank that are on other ranks."""
    stages = layout.rank_stages(rank)
    return sum(stage > 0 and stage - 1 not in stages for stage in stages)


def mask_bytes(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes of attention masks kept for backward: whole rows squared, one for all blocks of a stage.

    There is a document mask for every row and every micro-batch in flight, and one window mask. Where some
    blocks have no window there are two of each. Kernels that are told where documents start need no mask.
    Where attention has parts of rows, masks are made per tile and not kept.
    """
    if not attention_masks(job, layout.row_parts):
        return 0.0
    kinds = 2 if job.data.keeps_documents_apart and windowed(job) and job.model.full_attention_every else 1
    one = kinds * job.data.sequence_length**2 * COMPUTE_BYTES[job.precision]
    if not job.data.keeps_documents_apart:
        return float(one)
    rows = layout.widest_rows(job.data.global_batch)
    return one * rows * len(layout.rank_stages(rank)) * in_flight(job, layout, rank)


def narrows(job: JobConfig) -> bool:
    """Whether weights as they compute and the residual stream are in 16 bits, beside fp32 masters."""
    narrow = COMPUTE_BYTES[job.precision] < STATE_BYTES[job.precision]
    return narrow and job.adaptive_precision.error_bound is None


def weight_bytes(job: JobConfig) -> int:
    """Bytes of a weight as it computes and is gathered."""
    return COMPUTE_BYTES[job.precision] if narrows(job) else STATE_BYTES[job.precision]


def stream_bytes(job: JobConfig) -> int:
    """Bytes of a value on the residual stream; that of adaptive precision is fp32."""
    return weight_bytes(job)


def activation_bytes(job: JobConfig) -> int:
    """Bytes of a value that blocks keep: under adaptive precision all of it in full, while it chooses."""
    adaptive = job.adaptive_precision.error_bound is not None
    return STATE_BYTES[job.precision] if adaptive else COMPUTE_BYTES[job.precision]


def kept_by_kind(job: JobConfig, layout: Layout) -> dict[RecomputeKind, float]:
    """Bytes per token that a block keeps for backward, by the treatment of its activations."""
    sizes, item = sizes_of(job.model), activation_bytes(job)
    scores = score_bytes(job, layout.row_parts)
    wider = (stream_bytes(job) - item) * sizes.hidden
    padded = (rows_sent(job, layout.ep, layout.cp) - 1) * job.model.moe.top_k
    moe_inner = job.model.moe.intermediate_size
    whole: float = sizes.activations - sizes.hidden_layer + hidden_layer_values(job)
    whole += padded * (2 * sizes.hidden + 4 * moe_inner)
    return {
        "kept": whole * item + 2 * wider + _routing(job) + _unfused(job, layout.cp) + scores.kept,
        "full": sizes.hidden * item + wider,
        "selective": (sizes.products + padded * (sizes.hidden + 2 * moe_inner)) * item
        + wider
        + scores.products,
        "int8": _packed(job, whole) + scores.kept / COMPUTE_BYTES[job.precision] * ACTIVATION_8BIT_BYTES,
    }


def hidden_layer_values(job: JobConfig) -> int:
    """Values per token that a block's hidden layer keeps; of compiled ones the gate's silu is made again."""
    again = job.model.intermediate_size if job.kernels.activation == "compiled" else 0
    return sizes_of(job.model).hidden_layer - again


class ScoreBytes(NamedTuple):
    """Bytes per token of attention scores that are in memory, of a block.

    Fields:
        kept: for backward: capped, softmax's, which is wide, and that cast for the product with values.
        products: of matrix products alone.
        at_work: their gradients, while a block's backward pass runs.
    """

    kept: float = 0.0
    products: float = 0.0
    at_work: float = 0.0


def score_bytes(job: JobConfig, parts: int) -> ScoreBytes:
    """Bytes of scores that are capped by the formulas; other kernels are taken to keep none.

    Over ``parts`` of rows they are made again in the backward pass.
    """
    model, item = job.model, COMPUTE_BYTES[job.precision]
    capped = model.builder is None and model.attention_softcap is not None
    if not capped or job.kernels.attention == "flash-attn":
        return ScoreBytes()
    each, wide = float(model.heads * job.data.sequence_length), max(4, item)
    narrow = item if item < wide else 0
    if parts > 1:
        return ScoreBytes(at_work=2 * each * wide / parts)
    return ScoreBytes(each * (item + wide + narrow), each * item, each * (wide + narrow))


def _packed(job: JobConfig, values: float) -> float:
    """Bytes per token that a block keeps in 8 bits.

    They are its values, and besides them rows' statistics and routes, which stay as they are.
    """
    model, moe = job.model, job.model.moe
    if job.cluster.device == "cpu" and model.builder is None:
        values += model.query_width
        values += 0 if norm_kernel(job, "cpu") == "closed-form" else sizes_of(model).rms_normed
    routes = 0
    if moe.experts:
        values += model.hidden_size * narrows(job)
        routes = 8 * (4 * moe.top_k + moe.experts)
    statistics = STATE_BYTES[job.precision] * ((model.heads if model.builder is None else 0) + 2)
    return values * ACTIVATION_8BIT_BYTES + routes + statistics


def _routing(job: JobConfig) -> int:
    """Further bytes per token that a mixture keeps.

    They are the tokens' routes, and of a stream in 16 bits a wide input of the router.
    """
    moe = job.model.moe
    if not moe.experts:
        return 0
    indices = 8 * (4 * moe.top_k + moe.experts)
    wide = job.model.hidden_size * narrows(job)
    return indices + wide * STATE_BYTES[job.precision]


def _unfused(job: JobConfig, cp: int) -> float:
    """Further bytes per token that a block keeps on CPUs, or under context parallelism.

    The result of attention is copied into rows for the output projection. Torch's RMSNorm has no kernel on
    CPUs and keeps its scaled input.
    """
    model = job.model
    if model.builder is not None:
        return 0.0
    copied = model.query_width * COMPUTE_BYTES[job.precision]
    if job.cluster.device != "cpu":
        return float(copied) if cp > 1 else 0.0
    closed = norm_kernel(job, "cpu") == "closed-form"
    normed = 0 if closed else sizes_of(model).rms_normed
    return float(normed * STATE_BYTES[job.precision] + copied)


def _by_kind(again: RecomputedBlocks) -> dict[RecomputeKind, int]:
    return {"kept": again.kept, "full": again.full, "selective": again.selective, "int8": again.int8}


def offloaded_activations(job: JobConfig, layout: Layout, rank: int, again: RecomputedBlocks) -> float:
    """Bytes that a pipeline rank's blocks send to the host, and get back, per micro-batch."""
    if not layout.offload_activations:
        return 0.0
    of = kept_by_kind(job, layout)
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    cut = layout.tp if sizes_of(job.model).sequence_cut else 1
    held = sum(of[kind] * number for kind, number in _by_kind(again).items())
    return tokens * held / cut


def in_flight(job: JobConfig, layout: Layout, rank: int) -> float:
    if layout.pp == 1:
        return 1.0
    schedule = schedule_of(layout.schedule, job.layout.actions)
    return schedule.in_flight(layout.pipeline_shape(job.data.global_batch), rank)
