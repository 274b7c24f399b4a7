"""A parallel layout as a value: its degrees, its rank order, and what every rank must hold.

Ranks are numbered with tensor parallelism innermost, then context, data and pipeline:
``rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index``, so that the chattiest axis
falls on neighbouring devices (Megatron-LM's order, Narayanan et al. 2021).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from picotron_ray.errors import LayoutError
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import SCHEDULES, canonical_name
from picotron_ray.layout.uneven import counts_name, span

_LAYOUT_NAME = re.compile(r"\bdp\d+-tp\d+-pp\d+-[\w-]+")

ContextVariant = Literal["ring", "all-gather", "ulysses"]
Zero = Literal[0, 1, 2, 3]


class Coordinates(NamedTuple):
    """A rank's place on each mesh axis (0-based)."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Parallel layout: the way in which one generation cuts the model and the batch.

    >>> layout = Layout(dp=2, pp=2, zero=2, micro_batch=4)
    >>> layout.world_size, str(layout)
    (4, 'dp2-tp1-pp2-zero2-1f1b-mb4')

    Rank 3 is on the second pipeline stage, in the second replica:

    >>> layout.coordinates(3)
    Coordinates(pp=1, dp=1, cp=0, tp=0)

    Each replica feeds half of a global batch, in micro-batches of 4 rows:

    >>> layout.rows(dp_index=1, global_batch=32), layout.micro_batches(global_batch=32)
    ((16, 32), 4)

    Logs and manifests hold a layout as plain data:

    >>> Layout.from_dict(layout.to_dict()) == layout
    True

    Fields:
        dp, tp, pp, cp, ep: degrees of data, tensor, pipeline, context and expert parallelism.
        context: how attention sees the keys of other context-parallel ranks; it matters only where
            ``cp > 1``.
        zero: what is cut over dp and cp (Rajbhandari et al. 2020): 0 nothing; 1 weights and optimizer state,
            gathered and reduced once per step; 2 gradients too, reduced with every micro-batch; 3 weights
            also between forward and backward, gathered anew for each of them (all by FSDP2).
        replicate: copies of the cut state, each over 1/replicate of the replicas (HSDP, Zhao et al. 2023);
            more than 1 only with ``zero``.
        schedule: pipeline schedule; it matters only where ``pp > 1``.
        virtual_stages: pipeline stages per rank, as many as the schedule asks.
        placement: the stages of each pipeline rank, ascending, where the schedule is ``custom``; else empty.
            It is what ranks hold; in which order they compute, the job says (``layout.actions``), so that
            logs and manifests do not repeat long lists.
        micro_batch: rows (sequences) per micro-batch and DP replica; with ``replica_rows`` at most so many.
        recompute: the blocks that compute their activations again in the backward pass, as a policy of
            ``layout.recompute_policy``.
        offload_activations: whether what blocks keep for the backward pass waits in host memory.
        replica_rows: rows of the global batch that each DP replica is fed, in order; empty: an even split.
            All replicas run the same number of micro-batches, each as narrow as its own rows allow.
        stage_blocks: blocks of each pipeline stage, in order; empty: by the planner's partition.
        expert_order: by layer, its experts in the order of an ep group's ranks (`layout.expert_order`); a
            layer that is missing, or empty: by their numbers. It says where experts are and nothing else:
            layouts that differ in it alone are equal.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: Zero = 0
    replicate: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    context: ContextVariant = "ring"
    placement: tuple[tuple[int, ...], ...] = ()
    offload_activations: bool = False
    replica_rows: tuple[int, ...] = ()
    stage_blocks: tuple[int, ...] = ()
    expert_order: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", canonical_name(self.schedule))

    @property
    def world_size(self) -> int:
        """Ranks (processes) that the layout needs; experts are folded over dp."""
        return self.dp * self.tp * self.pp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """The place of ``rank`` on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp, dp, cp, tp)

    def rank(self, at: Coordinates) -> int:
        """The rank at a place, the inverse of `coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    @property
    def replicas(self) -> int:
        """Ranks with the same part of the model, over which gradients are summed and ZeRO shards: dp x cp."""
        return self.dp * self.cp

    def replica(self, rank: int) -> int:
        """Index of ``rank`` among its replicas, context-parallel ranks innermost."""
        at = self.coordinates(rank)
        return at.dp * self.cp + at.cp

    @property
    def shards(self) -> int:
        """Parts into which ZeRO cuts what replicas would hold alike; 1 without it."""
        return self.replicas // self.replicate if self.zero else 1

    def shard(self, rank: int) -> int:
        """Index of the part that ``rank`` holds. Neighbours among the replicas hold different ones."""
        return self.replica(rank) % self.shards

    @property
    def waits_inside(self) -> bool:
        """Whether ranks wait for each other inside forward and backward passes, besides a pipeline's hops."""
        sharded = self.zero > 0 and self.replicas > 1
        return sharded or max(self.tp, self.cp, self.ep) > 1

    @property
    def row_parts(self) -> int:
        """Parts of a row that attention has keys of: cp, or 1 where it has whole rows of some heads."""
        return 1 if self.context == "ulysses" else self.cp

    @property
    def stages(self) -> int:
        """Pipeline stages, of all ranks together."""
        return self.pp * self.virtual_stages

    @property
    def cut(self) -> int | tuple[int, ...]:
        """Blocks of each pipeline stage, or the number of stages where the planner partitions."""
        return self.stage_blocks or self.stages

    def rank_stages(self, pp_index: int) -> tuple[int, ...]:
        """The stages that one pipeline rank holds, ascending."""
        if self.placement:
            return self.placement[pp_index]
        return SCHEDULES[self.schedule].rank_stages(self.pp, self.virtual_stages, pp_index)

    @property
    def hops(self) -> int:
        """Stages of one pipeline rank, at most, whose output goes to another rank."""
        held = [set(self.rank_stages(rank)) for rank in range(self.pp)]
        return max(sum(s + 1 < self.stages and s + 1 not in stages for s in stages) for stages in held)

    @property
    def first_stage_rank(self) -> int:
        """Pipeline rank of the first stage, which has the embedding."""
        return next((rank for rank, stages in enumerate(self.placement) if 0 in stages), 0)

    @property
    def last_stage_rank(self) -> int:
        """Pipeline rank of the last stage, which has the head and the loss."""
        if self.placement:
            return next(rank for rank, stages in enumerate(self.placement) if self.stages - 1 in stages)
        return SCHEDULES[self.schedule].last_stage_rank(self.pp, self.virtual_stages)

    def other_end(self, pp_index: int) -> int | None:
        """Pipeline rank of the other end, for that of the first stage or the last; else None."""
        first, last = self.first_stage_rank, self.last_stage_rank
        return {first: last, last: first}.get(pp_index) if first != last else None

    def expert_index(self, rank: int) -> int:
        """Index of the 1/ep of the experts that ``rank`` holds. Neighbouring replicas hold different ones."""
        return self.replica(rank) % self.ep

    def experts_of(self, layer: int | None) -> tuple[int, ...]:
        """The experts of a layer in the order of an ep group's ranks; empty: by their numbers."""
        if layer is None or layer >= len(self.expert_order):
            return ()
        return self.expert_order[layer]

    def expert_replica(self, rank: int) -> int:
        """Index of ``rank`` among the replicas / ep that work with the same experts."""
        return self.replica(rank) // self.ep

    @property
    def expert_shards(self) -> int:
        """Parts into which ZeRO cuts what expert parallelism left."""
        return max(1, self.shards // self.ep)

    def expert_shard(self, rank: int) -> int:
        """Index of the part of its experts that ``rank`` holds."""
        return self.shard(rank) // self.ep

    # --- state groups: which ranks hold the same shards of weights and optimizer state ---------------

    @property
    def state_groups(self) -> int:
        """Number of distinct shards of the training state. All of them together are the whole state."""
        return self.pp * (self.shards if self.zero else self.ep) * self.tp

    def state_group(self, rank: int) -> int:
        """The shard of the training state that ``rank`` holds."""
        at = self.coordinates(rank)
        parts = self.shards if self.zero else self.ep
        part = self.shard(rank) if self.zero else self.expert_index(rank)
        return (at.pp * parts + part) * self.tp + at.tp

    def state_replicas(self, rank: int) -> tuple[int, ...]:
        """All ranks, in order, that hold the same shard as ``rank`` (itself included)."""
        group = self.state_group(rank)
        return tuple(r for r in range(self.world_size) if self.state_group(r) == group)

    # --- batch -------------------------------------------------------------------------------------

    def rows(self, dp_index: int, global_batch: int) -> tuple[int, int]:
        """Half-open range of rows of the global batch that one DP replica feeds (uneven is fine).

        A smaller batch than ``replica_rows`` are of, as at the end of an evaluation, leaves the last replicas
        fewer. Raises LayoutError for a larger one, some of whose rows nobody would feed.

        >>> [Layout(dp=3, replica_rows=(5, 1, 2)).rows(index, 8) for index in range(3)]
        [(0, 5), (5, 6), (6, 8)]
        """
        if self.replica_rows:
            if sum(self.replica_rows) < global_batch:
                text = f"saw a sum of {sum(self.replica_rows)}, expected the global batch of {global_batch}"
                raise LayoutError(f"layout.replica_rows: {text}")
            start, end = span(self.replica_rows, dp_index)
            return min(start, global_batch), min(end, global_batch)
        share, extra = divmod(global_batch, self.dp)
        start = dp_index * share + min(dp_index, extra)
        return start, start + share + (dp_index < extra)

    def most_rows(self, global_batch: int) -> int:
        """Rows per step of the DP replica that feeds most."""
        return max(self.replica_rows) if self.replica_rows else -(-global_batch // self.dp)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches per step, the same on all replicas; rows of weight 0 fill the last ones."""
        return max(1, -(-self.most_rows(global_batch) // self.micro_batch))

    def micro_batch_rows(self, dp_index: int, global_batch: int) -> int:
        """Rows per micro-batch of one DP replica, the same in all of its micro-batches.

        Without ``replica_rows`` that is ``micro_batch``. With them, it is what the replica's own rows need,
        so that a replica with fewer rows computes less.

        >>> slow = Layout(dp=3, micro_batch=4, replica_rows=(8, 8, 3))
        >>> slow.micro_batches(19), [slow.micro_batch_rows(index, 19) for index in range(3)]
        (2, [4, 4, 2])
        """
        if not self.replica_rows:
            return self.micro_batch
        return max(1, -(-self.replica_rows[dp_index] // self.micro_batches(global_batch)))

    def widest_rows(self, global_batch: int) -> int:
        """Rows per micro-batch of the DP replica that feeds most."""
        if not self.replica_rows:
            return self.micro_batch
        return max(1, -(-max(self.replica_rows) // self.micro_batches(global_batch)))

    def pipeline_shape(self, global_batch: int) -> PipelineShape:
        """The pipeline that the layout's schedule runs."""
        return PipelineShape(self.pp, self.virtual_stages, self.micro_batches(global_batch))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as slots and manifests keep it: without the order of experts, which only readers of
        slots ask for, and which the generation's spec has.
        """
        data = asdict(replace(self, expert_order=()))
        del data["expert_order"]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layout:
        """The layout of `to_dict`, of an earlier version too."""
        counts = {name: tuple(data.get(name, ())) for name in ("replica_rows", "stage_blocks")}
        return cls(**{**data, "placement": tuple(map(tuple, data.get("placement", ()))), **counts})

    def __str__(self) -> str:
        parts = [f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}"]
        if self.cp > 1:
            parts.append(
                f"cp{self.cp}" + {"ring": "", "all-gather": "-gather", "ulysses": "-ulysses"}[self.context]
            )
        if self.ep > 1:
            parts.append(f"ep{self.ep}")
        if self.zero:
            parts.append(f"zero{self.zero}" + (f"-hsdp{self.replicate}" if self.replicate > 1 else ""))
        if self.pp > 1:
            parts.append(self.schedule + (f"-v{self.virtual_stages}" if self.virtual_stages > 1 else ""))
        parts.append(f"mb{self.micro_batch}")
        if self.recompute != "none":
            parts.append(self.recompute)
        if self.offload_activations:
            parts.append("offload")
        if self.replica_rows:
            parts.append(f"rows{counts_name(self.replica_rows)}")
        if self.stage_blocks:
            parts.append(f"blocks{counts_name(self.stage_blocks)}")
        return "-".join(parts)


def current_names(text: str) -> str:
    """Text in which every layout's name (``str(layout)``) has its schedule's name instead of an alias.

    >>> current_names("dp2-tp1-pp2-afab-mb4: 0.5 s per step")
    'dp2-tp1-pp2-gpipe-mb4: 0.5 s per step'
    """

    def renamed(found: re.Match[str]) -> str:
        name = found[0]
        for entry in SCHEDULES.values():
            for alias in entry.aliases:
                name = name.replace(f"-{alias}-", f"-{entry.name}-")
        return name

    return _LAYOUT_NAME.sub(renamed, text)
