"""Least bytes of a rank, however replicas share its state and whatever is recomputed.

A search asks for them before all else: a micro-batch that is above a device's memory by its floor needs
neither cost nor estimate. They are a part of what `memory_moments` counts, and cheap for many micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import is_quantized
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import PipelineSchedule, schedule_of
from picotron_ray.planner.kept_activations import STATE_BYTES, kept_by_kind
from picotron_ray.planner.logit_bytes import logit_bytes
from picotron_ray.planner.memory import rank_state
from picotron_ray.planner.model_sizes import rank_depths, sizes_of
from picotron_ray.planner.narrow_gathers import least_weight_bytes


class StateFloor(NamedTuple):
    """Bytes of state, and of what ZeRO holds whole beside it at any time.

    Fields:
        later: once gradients are there.
        first: where all micro-batches of a step are in flight together, which begins without gradients.
    """

    later: float
    first: float


class RankFloor(NamedTuple):
    """Bytes of one pipeline rank: of its state, and per row of a micro-batch.

    Fields:
        depth: its blocks.
        kept: of one block and micro-batch in flight, in any case.
        working: that one block's backward pass needs besides.
        loss, loss_fixed: of logits per row, and of logits however many rows there are.
    """

    rank: int
    depth: int
    state: StateFloor
    kept: float
    working: float
    loss: float = 0.0
    loss_fixed: float = 0.0


class MemoryFloor(NamedTuple):
    """The floor of all layouts that differ in micro-batch, sharding and recomputation alone."""

    pp: int
    virtual_stages: int
    schedule: PipelineSchedule
    ranks: tuple[RankFloor, ...]

    def bytes(self, rows: int, micro_batches: int) -> float:
        """Least bytes of the fullest rank, for so many rows in each of so many micro-batches."""
        return max([self._of_rank(one, rows, micro_batches) for one in self.ranks])

    def _of_rank(self, one: RankFloor, rows: int, micro_batches: int) -> float:
        flying = 1.0
        if self.pp > 1:
            shape = PipelineShape(self.pp, self.virtual_stages, micro_batches)
            flying = self.schedule.in_flight(shape, one.rank)
        state = one.state.first if micro_batches <= flying else one.state.later
        working = rows * one.working * min(1.0, one.depth * flying)
        loss = rows * one.loss * min(1.0, flying) + one.loss_fixed
        return state + rows * one.kept * one.depth * flying + max(working, loss)


def memory_floor(job: JobConfig, leanest: Sequence[Layout]) -> MemoryFloor:
    """The floor of layouts that differ in micro-batch, sharding and recomputation alone.

    Args:
        leanest: one for each ZeRO stage that they have, with the fewest copies.
    """
    layout = leanest[0]
    sizes, of = sizes_of(job.model), kept_by_kind(job, layout)
    tokens = job.data.sequence_length // layout.cp
    cut = layout.tp if sizes.sequence_cut else 1
    quantized = job.layout.recompute != "auto" and is_quantized(job.layout.recompute)
    kept = (
        0.0 if layout.offload_activations else tokens / cut * (min(of.values()) if quantized else of["full"])
    )
    working = 0.0 if quantized or not kept else tokens / cut * (of["kept"] - of["full"])
    head, last = logit_bytes(job, layout, tokens, (0.0, 0.0), 1.0).loss, layout.last_stage_rank
    logits = (0.0, head) if job.kernels.loss == "linear" else (head, 0.0)
    ranks = []
    for rank in sorted({layout.first_stage_rank, last}):
        depth = sum(rank_depths(job, layout, rank))
        state = _state_floor(job, leanest, rank)
        ranks.append(RankFloor(rank, depth, state, kept, working, *(logits if rank == last else ())))
    schedule = schedule_of(layout.schedule, job.layout.actions)
    return MemoryFloor(layout.pp, layout.virtual_stages, schedule, tuple(ranks))


def _state_floor(job: JobConfig, leanest: Sequence[Layout], rank: int) -> StateFloor:
    """The least over ZeRO stages; of a mixture's, which gathers not all of its weights, without those."""
    wide, later, first = STATE_BYTES[job.precision], math.inf, math.inf
    for layout in leanest:
        found = rank_state(job, layout, rank)
        whole, part = found.parameters * wide, found.mine * wide
        gathered = 0.0
        if layout.zero and not sizes_of(job.model).experts:
            freed = layout.zero == 3 and (layout.pp == 1 or layout.virtual_stages > 1)
            unreduced = layout.zero == 1 or layout.pp > 1
            weights = 0.0 if freed else found.parameters * least_weight_bytes(job)
            gathered = weights + (whole - part if unreduced else 0.0)
        fresh = whole if layout.zero == 1 or (layout.zero and layout.pp > 1) else part
        later = min(later, found.state + gathered)
        first = min(first, found.state + gathered - fresh)
    return StateFloor(later, first)
