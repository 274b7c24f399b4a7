"""Bytes of activations that a rank's blocks keep for backward, and of the copies of weights beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import attention_masks, norm_kernel, windowed
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
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
"""Share of a block's activations that its backward pass has unpacked from 8 bits at a time."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of one block on one rank, by what becomes of its activations.

    Fields:
        kept, selective, full, int8: that it keeps for backward, of all micro-batches in flight.
        travelling: whether activations are offloaded: the block at work and the one that travels are here.
        copy, joined: of the copies that autocast makes of its weights, and of those of fused projections.
        freed: whether ZeRO-3 frees copies with the block (``parallel.memory.weight_casts``).
        selective_again, full_again: that its second forward pass makes anew, copies included.
        int8_again: that its backward pass has unpacked.
    """

    kept: float
    selective: float
    full: float
    int8: float
    travelling: bool
    copy: float
    joined: float
    freed: bool
    selective_again: float
    full_again: float
    int8_again: float

    def held(self, again: RecomputedBlocks) -> float:
        """Bytes that all blocks of a rank keep for backward."""
        kinds = (
            (again.kept, self.kept),
            (again.selective, self.selective),
            (again.full, self.full),
            (again.int8, self.int8),
        )
        if self.travelling:
            return 2 * max((size for number, size in kinds if number), default=0.0)
        return sum(number * size for number, size in kinds)

    def copies(self, sets: float) -> float:
        """Bytes of autocast's copies of weights: one set per block and forward pass, until its backward pass.

        Recomputed blocks free theirs when the forward pass ends.
        """
        return self.copy * min(1.0, sets) + self.joined * sets if self.freed else self.copy * sets

    def again(self, again: RecomputedBlocks) -> float:
        """Bytes that one block's backward pass makes anew."""
        if again.full:
            return self.full_again
        if again.selective:
            return self.selective_again
        return self.int8_again if again.int8 else 0.0


def block_bytes(job: JobConfig, layout: Layout, flying: float) -> BlockBytes:
    """The bytes of one block of a layout, ``flying`` micro-batches being in flight.

    Tensor parallelism cuts all of it where it comes with sequence parallelism, but for `_whole`.
    """
    sizes, of, item = sizes_of(job.model), kept_by_kind(job, layout), COMPUTE_BYTES[job.precision]
    cut = layout.tp if sizes.sequence_cut else 1
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    whole = {} if layout.offload_activations else _whole(job, layout)
    each = 1.0 if layout.offload_activations else flying
    kept = {kind: tokens * (size / cut + whole.get(kind, 0.0)) for kind, size in of.items()}
    matrices = sizes.matrices - sizes.experts + sizes.experts // layout.ep
    fused = job.kernels.projections == "fused"
    joined = sizes.fused + sizes.fused_experts // layout.ep if fused else 0
    copy = matrices / layout.tp * item if casts(job) else 0.0
    return BlockBytes(
        kept=kept["kept"] * each + _joined_bytes(job, layout) * flying,
        selective=kept["selective"] * each,
        full=kept["full"] * each,
        int8=kept["int8"] * each,
        travelling=layout.offload_activations,
        copy=copy,
        joined=joined / layout.tp * item if casts(job) else 0.0,
        freed=layout.zero == 3,
        selective_again=tokens / cut * (of["kept"] - of["selective"]) + copy,
        full_again=tokens / cut * (of["kept"] - of["full"]) + copy,
        int8_again=UNPACKED_AT_ONCE * tokens / cut * of["kept"],
    )


def _joined_bytes(job: JobConfig, layout: Layout) -> float:
    """Bytes of weights that fused projections copy, kept for backward by a micro-batch and block.

    Weights that lie together in memory are not copied: those without ZeRO and outside a stack of experts.
    Copies that autocast makes either way are not counted, nor those of recomputed blocks.
    """
    if job.kernels.projections != "fused" or casts(job):
        return 0.0
    sizes = sizes_of(job.model)
    dense, experts = sizes.fused, sizes.fused_experts
    return ((dense if layout.zero else 0) + experts / layout.ep) / layout.tp * STATE_BYTES[job.precision]


def _whole(job: JobConfig, layout: Layout) -> dict[RecomputeKind, float]:
    """Further bytes per token that tensor parallelism leaves whole on each rank, of a block.

    Sequence parallelism gathers the inputs of attention and of the hidden layer, which projections keep, each
    its own copy under autocast; overlapped products gather them again instead. Selective recomputation
    keeps what the output projections gave before it is cut. Of a mixture's experts the rows that go in and
    come out are whole, weighted ones too; with expert parallelism they are kept once more as they came back.
    """
    moe, sizes, item = job.model.moe, sizes_of(job.model), COMPUTE_BYTES[job.precision]
    row = moe.top_k * sizes.hidden if moe.experts else 0
    inputs = 0 if job.kernels.tp_overlap != "none" else 2 * sizes.hidden
    if inputs and casts(job) and job.kernels.projections == "separate":
        inputs += sizes.recast
    share = 1 - 1 / layout.tp if sizes.sequence_cut else 0.0
    kept = share * (inputs * item + row * (2 * item + STATE_BYTES[job.precision]))
    kept += row * item if layout.ep > 1 else 0
    packed = kept / item * ACTIVATION_8BIT_BYTES
    return {"kept": kept, "selective": share * (2 * sizes.hidden + row) * item, "int8": packed}


def stage_end_bytes(job: JobConfig, layout: Layout, rank: int, flying: float) -> float:
    """Bytes of what enters and leaves stages: their outputs until backward, and buffers to receive.

    torch's pipelines allocate a buffer for every micro-batch of a step and every neighbour on another rank.
    The input of a stage's first block lies in such a buffer.
    """
    hidden = _stage_output_bytes(job, layout)
    if layout.pp == 1:
        return hidden
    count, before = layout.micro_batches(job.data.global_batch), _neighbours(layout, rank)[0]
    own = flying - min(flying, count) * before / len(layout.rank_stages(rank))
    return receive_bytes(job, layout, rank) + hidden * own


def receive_bytes(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes of the buffers that stages receive into: one for every micro-batch and remote neighbour."""
    count = layout.micro_batches(job.data.global_batch)
    return _stage_output_bytes(job, layout) * count * sum(_neighbours(layout, rank))


def _stage_output_bytes(job: JobConfig, layout: Layout) -> float:
    sizes = sizes_of(job.model)
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    return tokens * sizes.hidden * STATE_BYTES[job.precision] / (layout.tp if sizes.sequence_cut else 1)


def _neighbours(layout: Layout, rank: int) -> tuple[int, int]:
    """Number of stages before and after those of a pipeline rank that are on other ranks."""
    stages = layout.rank_stages(rank)
    before = sum(stage > 0 and stage - 1 not in stages for stage in stages)
    after = sum(stage < layout.stages - 1 and stage + 1 not in stages for stage in stages)
    return before, after


def mask_bytes(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes of attention masks kept for backward: whole rows squared, one for all blocks of a stage.

    There is a document mask for every row and every micro-batch in flight, and one window mask. Where some
    blocks have no window there are two of each. Kernels that are told where documents start need no mask.
    Where attention has parts of rows, masks are made per tile and not kept.
    """
    if not attention_masks(job, layout.row_parts):
        return 0.0
    kinds = 2 if job.data.document_masks and windowed(job) and job.model.full_attention_every else 1
    one = kinds * job.data.sequence_length**2 * COMPUTE_BYTES[job.precision]
    if not job.data.document_masks:
        return float(one)
    rows = layout.widest_rows(job.data.global_batch)
    return one * rows * len(layout.rank_stages(rank)) * in_flight(job, layout, rank)


def casts(job: JobConfig) -> bool:
    """Whether autocast makes copies of all weights for matrix products."""
    return job.precision in ("bf16", "fp16") and job.adaptive_precision.error_bound is None


def kept_by_kind(job: JobConfig, layout: Layout) -> dict[RecomputeKind, float]:
    """Bytes per token that a block keeps for backward, by the treatment of its activations.

    Under autocast the residual stream stays wide, and every projection casts its own input.
    """
    sizes, item = sizes_of(job.model), COMPUTE_BYTES[job.precision]
    scores = score_bytes(job, layout.row_parts)
    wider = (STATE_BYTES[job.precision] - item) * sizes.hidden
    whole = sizes.activations
    if job.kernels.activation == "compiled":  # silu of the gate is computed again
        whole -= job.model.intermediate_size
    if casts(job) and job.kernels.projections == "separate":
        whole += sizes.recast
    return {
        "kept": whole * item + 2 * wider + _routing(job) + _unfused(job, layout.cp) + scores.kept,
        "full": sizes.hidden * item + wider,
        "selective": sizes.products * item + wider + scores.products,
        "int8": _packed(job, whole) + scores.kept / item * ACTIVATION_8BIT_BYTES,
    }


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
        values += model.hidden_size * (moe.top_k + casts(job))
        routes = 8 * (4 * moe.top_k + moe.experts)
    statistics = STATE_BYTES[job.precision] * ((model.heads if model.builder is None else 0) + 2)
    return values * ACTIVATION_8BIT_BYTES + routes + statistics


def _routing(job: JobConfig) -> int:
    """Further bytes per token that a mixture keeps.

    They are the tokens' routes, the weighted results, and under autocast a wide input of the router.
    """
    moe = job.model.moe
    if not moe.experts:
        return 0
    indices = 8 * (4 * moe.top_k + moe.experts)
    wide = job.model.hidden_size * (moe.top_k + casts(job))
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
