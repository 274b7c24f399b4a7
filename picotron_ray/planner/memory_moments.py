"""Moments of a step at which a rank's memory may be at its peak, between forward and the optimizer's update.

    forward    all blocks have run, the logits are made
    loss       logits, their softmax and gradients (three wide copies; two where tensor parallelism cuts them)
    head       the gradient of the head's weight is made
    scattered  ZeRO reduces it, from a copy
    backward   a block's backward pass: its gradients, one weight's gradient, what it computes again
    reduced    a later block's, while ZeRO still holds the copy from which the one before was reduced
    embedding  the gradient of the embedding's table is made, when no block of the micro-batch holds anything

`RankMoments` computes once what blocks have in common, so that a search may ask for many sets of recomputed
blocks. Each moment holds what micro-batches in flight keep for backward (`kept_activations`), and what ZeRO
has gathered then. The dry run (`train.dry_run`) counts the same bytes operator by operator
(``tests/gloo/planner/test_peaks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.experts import rows_sent
from picotron_ray.config.support.fast_path import fuses_projections
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.models.sizes import GATED_PIECE_BYTES
from picotron_ray.planner.kept_activations import (
    STATE_BYTES,
    BackwardBlocks,
    BlockBytes,
    block_bytes,
    hidden_layer_values,
    in_flight,
    mask_bytes,
    narrows,
    score_bytes,
    stage_end_bytes,
    stream_bytes,
    weight_bytes,
)
from picotron_ray.planner.logit_bytes import HeadBytes, casts_first, logit_bytes, waiting_logits
from picotron_ray.planner.model_sizes import padded_elements, sizes_of
from picotron_ray.planner.narrow_gathers import saved_of_block
from picotron_ray.planner.sent_bytes import in_root

LATE = 0.5
"""Share of a block's activations that are gone when nearly all of its gradients are there: the hidden layer,
which has most weights, comes first in the backward pass."""


class Moment(NamedTuple):
    """Bytes beside the state: of weights that compute and gradients that ZeRO has whole, and activations."""

    gathered: float
    activations: float

    @property
    def total(self) -> float:
        return self.gathered + self.activations


class GatheredBytes(NamedTuple):
    """Bytes of weights that compute and of gradients that ZeRO has whole, beside the state, by moment."""

    forward: float = 0.0
    loss: float = 0.0
    head: float = 0.0
    scattered: float = 0.0
    backward: float = 0.0
    reduced: float = 0.0
    embedding: float = 0.0


@dataclass(frozen=True, slots=True)
class RankMoments:
    """Constants of one pipeline rank, in bytes.

    Fields:
        blocks: of one block, by what becomes of its activations.
        stages: of the rank.
        flying: micro-batches in flight.
        fixed: masks, and what enters and leaves stages.
        at_work: gradients within a block, and of its largest weight.
        ends: the gradient of the embedding's table, and of its output; 0: no embedding here.
        fresh: gradients, and weights that stay, that a step begins without, where all its micro-batches are
            in flight together.
        unmade: of those, the gradients of the last block and the embedding, which come at the end.
        copies: weights in 16 bits that stay, also during the update; `gathered` has them too.
        made: gradients of one block that `gathered` has whole, when they are made.
    """

    blocks: BlockBytes
    stages: int
    flying: float
    fixed: float
    at_work: float
    logits: HeadBytes
    ends: float
    gathered: GatheredBytes
    fresh: float
    unmade: float
    copies: float
    made: float

    def peak(self, again: RecomputedBlocks) -> Moment:
        """The moment that needs most, if ``again`` of the blocks are computed again.

        A step begins without gradients, but for buckets that replicas reduce. Where all its micro-batches are
        in flight together, gradients grow as activations go. Then both ends of the first backward pass are
        looked at: all activations without gradients, and all gradients with one micro-batch less; of a single
        micro-batch, its last block with the gradients of all others.
        """
        flying, gathered, logits = self.flying, self.gathered, self.logits
        inside, passes = self.blocks.held(again), self.blocks.passes(again, flying)
        kept = inside + self.fixed
        passing = [
            *self._backward(passes, kept),
            (gathered.forward, kept + logits.forward),
            (gathered.loss, kept + logits.loss),
            (gathered.head, kept + logits.head),
            (gathered.scattered, kept),
        ]
        found = passing
        if self.fresh:
            found = [(whole - self.fresh, held) for whole, held in passing]
            if flying > 1:
                found += [(whole, held - kept / flying) for whole, held in passing]
            elif passes:
                last = self.fixed + self.at_work + passes[-1].kept + passes[-1].anew
                found.append((gathered.backward - self.made - self.unmade, last))
        if self.ends:
            found.append((gathered.embedding, (1 - 1 / max(1.0, flying)) * kept + self.ends))
        whole, held = max(found, key=sum)
        short = min(0.0, whole)
        return Moment(whole - short, max(0.0, held + short))

    def _backward(self, passes: Sequence[BackwardBlocks], kept: float) -> list[tuple[float, float]]:
        """Moments of a micro-batch's backward pass, as weights and gradients that ZeRO has, and activations.

        A block makes anew what it did not keep when all later ones of its stage are done with theirs, which
        count as evenly shared out over stages. Within a block, of which ZeRO has the gradients whole, they
        grow as activations go: both ends are looked at.
        """
        found, done, gathered = [], 0.0, self.gathered
        for number, one, anew in passes:
            work = kept - done + self.at_work + anew
            gone, whole = LATE * (one + anew), gathered.reduced if done else gathered.backward
            found += [(whole - self.made, work), (whole, work - gone)]
            if number > 1:
                found += [
                    (gathered.reduced - self.made, work - one),
                    (gathered.reduced, work - one - gone),
                ]
            done += number // self.stages * one
        return found


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
    # a gradient waits in 16 bits to be added up, or in the type of the sum where autograd casts it first
    # (`parallel.precision.compute_weights`); FSDP casts when it reduces
    added = (
        (wide if casts_first(job, layout) else item)
        if narrows(job) and not (layout.zero and layout.shards > 1)
        else 0
    )
    made, copies = weight_bytes(job) + added, _copies(job, layout, parameters, depth)
    return RankMoments(
        blocks=block_bytes(job, layout, flying),
        stages=layout.virtual_stages,
        flying=flying,
        fixed=mask_bytes(job, layout, rank) + stage_end_bytes(job, layout, rank, flying),
        at_work=max(
            tokens / cut * sizes.at_work * item
            + _gated_bytes(job, layout, tokens)
            + _largest_matrix(job, layout) * made,
            tokens / cut * _scores_at_work(job, layout),
        ),
        logits=logit_bytes(job, layout, tokens, (head, made), waiting_logits(job, layout))
        if head
        else HeadBytes(),
        ends=embed * made + tokens / cut * sizes.hidden * stream_bytes(job) if embed else 0.0,
        gathered=_gathered(job, layout, (head, embed), depth, parameters, whole - part, copies),
        fresh=(whole if unreduced else part) + _staying(job, layout, depth) if together else 0.0,
        unmade=(whole if unreduced else part)
        * (((parameters - head - embed) / max(1, depth) + embed) / max(1.0, parameters)),
        copies=copies,
        made=_made(job, layout, depth),
    )


def _scores_at_work(job: JobConfig, layout: Layout) -> float:
    """Bytes per token of gradients while those of attention's scores are made; 0: no scores in memory.

    They come with those of the residual stream and of values, when what the hidden layer kept is gone.
    """
    sizes, item = sizes_of(job.model), COMPUTE_BYTES[job.precision]
    scores = score_bytes(job, layout.row_parts).at_work
    return scores and scores + (sizes.hidden + sizes.scores - hidden_layer_values(job)) * item


def _gated_bytes(job: JobConfig, layout: Layout, tokens: float) -> float:
    """Bytes while gradients of experts' results are made, above those that their hidden layers take later.

    They are rows in the type of the results, and two wide pieces (`models.layers.expert_rows`); whole on each
    rank of tensor parallelism.
    """
    moe, item = job.model.moe, COMPUTE_BYTES[job.precision]
    if not moe.experts:
        return 0.0
    rows = tokens * moe.top_k * rows_sent(job, layout.ep, layout.cp)
    pieces = 2 * min(rows * job.model.hidden_size * STATE_BYTES[job.precision], GATED_PIECE_BYTES)
    later = tokens * moe.top_k * moe.intermediate_size / layout.tp * item
    return max(0.0, rows * job.model.hidden_size * item + pieces - later)


def _largest_matrix(job: JobConfig, layout: Layout) -> float:
    """Elements of the largest gradient of one weight; of stacked experts all of one matrix, twice."""
    sizes = sizes_of(job.model)
    if not sizes.block_products:
        return sizes.matrices / 4
    fused = fuses_projections(job, job.cluster.device, layout)
    dense = max(
        product.out * product.into
        for product in sizes.block_products
        if product.copies == 1 and (fused or product.cut == "into")
    )
    return max(dense, 2 * sizes.experts / 3 / layout.ep) / layout.tp


def _copies(job: JobConfig, layout: Layout, parameters: float, depth: int) -> float:
    """Bytes of weights in 16 bits beside masters that FSDP does not hold (``parallel.precision``)."""
    if not narrows(job):
        return 0.0
    if layout.zero and layout.shards > 1:
        parameters = depth * _alone(job, layout) / layout.tp
    return parameters * weight_bytes(job)


def _alone(job: JobConfig, layout: Layout) -> int:
    """Experts' parameters of a block that no two ranks share, before tensor parallelism."""
    return sizes_of(job.model).experts // layout.ep if layout.expert_shards == 1 else 0


def _made(job: JobConfig, layout: Layout, depth: int) -> float:
    """Bytes of gradients of a unit of blocks, before ZeRO reduces them or adds them up in a wider type."""
    if not layout.zero or ((layout.zero == 1 or layout.pp > 1) and not narrows(job)):
        return 0.0
    return _block_elements(job, layout) * _together(job, depth) * weight_bytes(job)


def _together(job: JobConfig, depth: int) -> int:
    """Blocks of a rank that ZeRO gathers and reduces at once."""
    return min(job.comm.zero_blocks, max(1, depth))


def _block_elements(job: JobConfig, layout: Layout) -> float:
    """Parameters of a block that are gathered, on one rank, with what ZeRO pads."""
    sizes = sizes_of(job.model)
    experts = sizes.experts // layout.ep - _alone(job, layout)
    held = sizes.block - sizes.experts + experts + padded_elements(job, layout) * layout.tp
    return sizes.whole_block + (held - sizes.whole_block) / layout.tp


def _gathered(
    job: JobConfig,
    layout: Layout,
    tables: tuple[float, float],
    depth: int,
    parameters: float,
    others: float,
    copies: float,
) -> GatheredBytes:
    """Bytes of weights that compute, beside their masters, and of gradients that ZeRO has whole.

    - ZeRO-1 keeps whole weights and gradients through all micro-batches; so does a pipeline, whose weights
      stay from a stage's backward pass to its next forward pass: of several stages of a rank all but one.
      A unit's gradients in 16 bits wait for the end of its backward pass, where they are added up.
    - ZeRO-2 and 3 reduce a unit's gradients after its backward pass, from a copy of them in the type that
      they are added up in, which they hold until the next unit's are reduced.
    - ZeRO-3 holds the block at work and the one fetched ahead (``comm.zero_blocks`` of them each), and the
      head from its use on. While the head computes there is the buffer besides in which it came. The
      embedding is there in its own forward pass alone.
    - Embedding and head that are one unit (`sent_bytes.in_root`) stay from their use to the end of the
      backward pass, and are reduced there.
    - Experts that no two ranks share are not gathered.

    Args:
        tables: elements of the head and of the embedding here.
        parameters: of the rank's stages, whole.
        others: bytes of the gradients that other ranks keep.
        copies: see `RankMoments`.
    """
    if not layout.zero:
        return GatheredBytes(*(copies,) * len(GatheredBytes._fields))
    sizes, wide, item = sizes_of(job.model), STATE_BYTES[job.precision], weight_bytes(job)
    head, embed = tables
    together = _together(job, depth)
    alone, elements = _alone(job, layout), _block_elements(job, layout) * together
    block, reduced = item * elements, wide * elements
    narrow = block - saved_of_block(job, layout) * together
    root = made = 0.0
    if in_root(job, layout):
        root, made, head, embed = (head if sizes.tied else head + embed), item * head, 0.0, 0.0
    always, last = item * root, item * head
    units = -(-depth // (together * layout.virtual_stages))
    freeing = _freeing(always, last, narrow, min(2, units) * narrow)
    whole = parameters + depth * (padded_elements(job, layout) - alone / layout.tp)
    whole = whole * item - depth * saved_of_block(job, layout)
    weights = all_kept = GatheredBytes(*(whole,) * len(freeing))
    if layout.zero == 1 or layout.pp > 1:
        if layout.zero == 3 and layout.virtual_stages > 1:
            weights = GatheredBytes(*(min(whole, one + _staying(job, layout, depth)) for one in freeing))
        made, block = (made, block) if narrows(job) else (0.0, 0.0)
        waiting = GatheredBytes(scattered=made, backward=made + block, reduced=made + block, embedding=made)
        return GatheredBytes(*(sum(both) + others + copies for both in zip(weights, waiting, strict=True)))
    weights = freeing if layout.zero == 3 else all_kept
    gradients = GatheredBytes(
        scattered=(item + wide) * head,
        backward=made + block + wide * head,
        reduced=made + block + (reduced if units > 1 else 0.0),
        embedding=made + max(reduced, wide * embed, wide * root - (always if layout.zero == 3 else 0.0)),
    )
    return GatheredBytes(*(one + other + copies for one, other in zip(weights, gradients, strict=True)))


def _staying(job: JobConfig, layout: Layout, depth: int) -> float:
    """Bytes of blocks' weights that stages of a rank have since their last backward pass, all but one's."""
    if layout.zero < 3 or layout.virtual_stages == 1:
        return 0.0
    if schedule_of(layout.schedule, job.layout.actions).by_stage:
        return 0.0
    block = _block_elements(job, layout) * weight_bytes(job) - saved_of_block(job, layout)
    return depth * block * (1 - 1 / layout.virtual_stages)


def _freeing(root: float, head: float, block: float, two: float) -> GatheredBytes:
    """Bytes of weights that ZeRO-3 holds at a time: of the root's unit, of the head's, of one of blocks and
    two that follow each other."""
    found = GatheredBytes(
        forward=max(2 * head, block),
        loss=head,
        head=head + block,
        scattered=block,
        backward=two,
        reduced=two,
    )
    return GatheredBytes(*(root + one for one in found))
