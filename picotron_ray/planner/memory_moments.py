"""Moments of a step at which a rank's memory may be at its peak, between forward and the optimizer's update.

    forward    all blocks have run, the logits are made; autocast still holds its copies of all weights
    loss       logits, their softmax and gradients (three wide copies; two where tensor parallelism cuts them)
    head       the gradient of the head's weight is made
    backward   a block's backward pass: its gradients, one weight's gradient, what it computes again
    reduced    a later block's, while ZeRO still holds the copy from which the one before was reduced
    embedding  the gradient of the embedding's table is made, when no block of the micro-batch holds anything

`RankMoments` computes once what blocks have in common, so that a search may ask for many sets of recomputed
blocks. Each moment holds what micro-batches in flight keep for backward (`kept_activations`), and what ZeRO
has gathered then. The dry run (`train.dry_run`) counts the same bytes operator by operator
(``tests/gloo/planner/test_peaks.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.planner.kept_activations import (
    STATE_BYTES,
    BlockBytes,
    block_bytes,
    casts,
    in_flight,
    mask_bytes,
    score_bytes,
    stage_end_bytes,
)
from picotron_ray.planner.model_sizes import sizes_of


class Moment(NamedTuple):
    """Bytes beside the state: weights and gradients that ZeRO has whole, and activations."""

    gathered: float
    activations: float

    @property
    def total(self) -> float:
        return self.gathered + self.activations


class GatheredBytes(NamedTuple):
    """Bytes of weights and gradients that ZeRO has whole, by moment."""

    forward: float = 0.0
    loss: float = 0.0
    head: float = 0.0
    backward: float = 0.0
    reduced: float = 0.0
    embedding: float = 0.0


class HeadBytes(NamedTuple):
    """Bytes of logits and what belongs to them, by moment; zeros on a rank without a head."""

    forward: float = 0.0
    loss: float = 0.0
    head: float = 0.0


@dataclass(frozen=True, slots=True)
class RankMoments:
    """Constants of one pipeline rank, in bytes.

    Fields:
        blocks: of one block, by what becomes of its activations.
        depth: blocks of the rank.
        flying: micro-batches in flight.
        fixed: masks, and what enters and leaves stages.
        at_work: gradients within a block, and of its largest weight.
        head_copy: autocast's copy of the head's weight.
        ends: the gradient of the embedding's table, and of its output; 0: no embedding here.
        fresh: gradients that a step begins without, where all its micro-batches are in flight together.
    """

    blocks: BlockBytes
    depth: int
    flying: float
    fixed: float
    at_work: float
    head_copy: float
    logits: HeadBytes
    ends: float
    gathered: GatheredBytes
    fresh: float

    def peak(self, again: RecomputedBlocks) -> Moment:
        """The moment that needs most, if ``again`` of the blocks are computed again.

        A step begins without gradients, but for buckets that replicas reduce. Where all its micro-batches are
        in flight together, gradients grow as activations go. Then both ends of the first backward pass are
        looked at: all activations without gradients, and all gradients with one micro-batch less.
        """
        blocks, flying, gathered, logits = self.blocks, self.flying, self.gathered, self.logits
        inside = blocks.held(again)
        kept = inside + self.fixed
        base = kept + blocks.copies((again.kept + again.int8) * flying)
        work = base + self.at_work + blocks.again(again)
        one = inside / max(1, self.depth) / max(1.0, flying)
        passing = [
            (gathered.backward, work),
            (gathered.reduced, work - one),
            (gathered.forward, base + blocks.copies(again.repeated) + self.head_copy + logits.forward),
            (gathered.loss, base + self.head_copy + logits.loss),
            (gathered.head, base + self.head_copy + logits.head),
        ]
        found = passing
        if self.fresh:
            found = [(whole - self.fresh, held) for whole, held in passing]
            if flying > 1:
                found += [(whole, held - kept / flying) for whole, held in passing]
        if self.ends:
            found.append((gathered.embedding, (1 - 1 / max(1.0, flying)) * base + self.ends))
        whole, held = max(found, key=sum)
        short = min(0.0, whole)
        return Moment(whole - short, max(0.0, held + short))


def rank_moments(
    job: JobConfig, layout: Layout, rank: int, depth: int, parameters: float, mine: float
) -> RankMoments:
    """The constants of a rank.

    Args:
        depth: its blocks.
        parameters: of its stages, whole.
        mine: those that ZeRO leaves this rank.
    """
    sizes, item, wide = sizes_of(job.model), COMPUTE_BYTES[job.precision], STATE_BYTES[job.precision]
    cut = layout.tp if sizes.sequence_cut else 1
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    table = sizes.vocabulary * sizes.hidden / cut
    head = table if rank == layout.last_stage_rank else 0.0
    embed = table if rank == layout.first_stage_rank else 0.0
    flying = in_flight(job, layout, rank)
    whole, part = parameters * wide, mine * wide
    buckets = not layout.zero and layout.replicas > 1
    together = layout.micro_batches(job.data.global_batch) <= flying and not buckets
    unreduced = layout.zero == 1 or (layout.zero and layout.pp > 1)
    narrow = wide if casts(job) else 0
    return RankMoments(
        blocks=block_bytes(job, layout, flying),
        depth=depth,
        flying=flying,
        fixed=mask_bytes(job, layout, rank) + stage_end_bytes(job, layout, rank, flying),
        at_work=tokens / cut * (sizes.at_work * item + score_bytes(job, layout.row_parts).at_work)
        + _largest_matrix(job, layout) * (item + narrow),
        head_copy=head * item if casts(job) else 0.0,
        logits=logit_bytes(job, layout, tokens, head * (item + narrow), flying) if head else HeadBytes(),
        ends=embed * wide + tokens / cut * sizes.hidden * wide if embed else 0.0,
        gathered=_gathered(job, layout, head * wide, embed * wide, depth, whole, part),
        fresh=(whole if unreduced else part) if together else 0.0,
    )


def logit_bytes(job: JobConfig, layout: Layout, tokens: float, weight: float, flying: float) -> HeadBytes:
    """Bytes of logits when they are made, when the loss is, and when the head's gradient (``weight``) is.

    In a pipeline a micro-batch keeps its softmax and its output until its backward pass. Capped logits are a
    further copy, wide.
    """
    sizes, item, wide = sizes_of(job.model), COMPUTE_BYTES[job.precision], STATE_BYTES[job.precision]
    cut = layout.tp if sizes.sequence_cut else 1
    narrow = item if item < wide else 0
    inputs = tokens * sizes.hidden * item
    capped = wide if job.model.builder is None and job.model.logit_softcap is not None else 0
    if job.kernels.loss == "linear":
        one = min(tokens, job.kernels.loss_chunk) * sizes.vocabulary / cut * (wide + narrow + capped)
        return HeadBytes(one, one, one + inputs + weight)
    one = tokens * sizes.vocabulary / cut
    waiting = 0.0
    if layout.pp > 1:
        waiting = one * ((wide + item) * (flying if layout.virtual_stages == 1 else 1.0) - wide)
    waiting += one * capped * (flying if layout.pp > 1 else 1.0)
    made = waiting + one * (item + narrow)
    loss = waiting + one * (2 * wide + narrow if cut > 1 else 3 * wide)
    return HeadBytes(made, loss, made + inputs + weight)


def _largest_matrix(job: JobConfig, layout: Layout) -> float:
    """Elements of the largest gradient of one weight; of stacked experts all of one matrix, twice."""
    sizes = sizes_of(job.model)
    if not sizes.block_products:
        return sizes.matrices / 4
    fused = job.kernels.projections == "fused"
    dense = max(
        product.out * product.into
        for product in sizes.block_products
        if product.copies == 1 and (fused or product.cut == "into")
    )
    return max(dense, 2 * sizes.experts / 3 / layout.ep) / layout.tp


def _gathered(
    job: JobConfig, layout: Layout, head: float, embed: float, depth: int, whole: float, part: float
) -> GatheredBytes:
    """Bytes of weights and gradients that ZeRO has whole.

    - ZeRO-1 keeps whole weights and gradients through all micro-batches, a pipeline too.
    - ZeRO-2 and 3 reduce a block's gradients after its backward pass, from a copy of them, and those of head
      and embedding, which are one unit, at its end.
    - ZeRO-3 holds the block at work and the one fetched ahead; head and embedding from their use on.
    - Experts that no two ranks share are not gathered.
    """
    if not layout.zero:
        return GatheredBytes()
    sizes, wide = sizes_of(job.model), STATE_BYTES[job.precision]
    experts = sizes.experts // layout.ep
    alone = experts if layout.expert_shards == 1 else 0
    held = sizes.block - sizes.experts + experts - alone
    block = wide * (sizes.whole_block + (held - sizes.whole_block) / layout.tp)
    ends = head if sizes.tied and layout.pp == 1 else head + embed
    freeing = GatheredBytes(ends, 0.0, ends, ends + 2 * block, ends + 2 * block, ends + block)
    all_kept = GatheredBytes(*(whole - alone * depth / layout.tp * wide,) * len(freeing))
    if layout.zero == 1 or layout.pp > 1:
        weights = freeing if layout.zero == 3 and layout.virtual_stages > 1 else all_kept
        return GatheredBytes(*(one + whole - part for one in weights))
    weights = freeing if layout.zero == 3 else all_kept
    gradients = GatheredBytes(backward=head + block, reduced=head + 2 * block, embedding=head + block)
    return GatheredBytes(*(one + other for one, other in zip(weights, gradients, strict=True)))
