"""Proof of a plan: predicted peaks and bytes of its layout beside those that fake tensors count."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import overlap_method
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import rank_memory
from picotron_ray.planner.model_sizes import blocks_again
from picotron_ray.planner.sent_bytes import AXES, sent_bytes
from picotron_ray.planner.words import counted
from picotron_ray.train.dry_run.call_order import order_problems
from picotron_ray.train.dry_run.run import DryRun, dry_run

MOST_RANKS = 3
PASSES = 2
"""Micro-batches that are stepped for each pipeline rank: two show what the second one finds kept."""


@dataclass(frozen=True, slots=True)
class RankProof:
    """One rank: bytes by the model and as counted, and what else it does in a step.

    Fields:
        rank: of the pipeline.
        predicted_peak, traced_peak: bytes, with the kernels of CPUs.
        predicted_sent, traced_sent: bytes of a step by axis.
        sent_by_type: those that were traced, by axis of the mesh and type.
        collectives, messages: calls of the step.
        kernels: operators that launch at least one.
        reads: times that the host reads from the device, by place in the code.
    """

    rank: int
    predicted_peak: float
    traced_peak: int
    predicted_sent: dict[str, float]
    traced_sent: dict[str, float]
    sent_by_type: dict[str, dict[str, int]]
    collectives: int
    messages: int
    kernels: int
    reads: dict[str, int]

    @property
    def error(self) -> float:
        """Of the predicted peak, as a share of the traced one."""
        return self.predicted_peak / self.traced_peak - 1

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "error": self.error}


@dataclass(frozen=True, slots=True)
class PlanProof:
    """A dry run of a layout's pipeline ranks: all of up to `MOST_RANKS`, else the ends and the fullest.

    Fields:
        micro_batches, of: micro-batches that were stepped, of those of the whole step.
        whole_peak: predicted bytes of the fullest rank in the whole step.
        order_problems: communicators that two of the ranks use in another order; under NCCL they would hang.
    """

    ranks: tuple[RankProof, ...]
    micro_batches: int
    of: int
    whole_peak: float
    order_problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        ranks = [one.to_dict() for one in self.ranks]
        steps = {"micro_batches": self.micro_batches, "of_micro_batches": self.of}
        problems = list(self.order_problems)
        return {"ranks": ranks, **steps, "whole_peak": self.whole_peak, "order_problems": problems}

    def lines(self) -> list[str]:
        """The proof as text."""
        part = "" if self.micro_batches == self.of else f"{self.micro_batches} of "
        found = [f"dry run    {part}{counted(self.of, 'micro-batch')} with fake tensors, kernels of CPUs:"]
        for one in self.ranks:
            found.append(
                f"  pp rank {one.rank}: peak {one.predicted_peak / 1e9:.3g} GB predicted, "
                f"{one.traced_peak / 1e9:.3g} GB traced ({100 * one.error:+.1f} %)"
            )
            found += [
                f"    sent over {axis}: {one.predicted_sent[axis] / 1e9:.3g} GB predicted,"
                f" {one.traced_sent[axis] / 1e9:.3g} GB traced"
                for axis in AXES
                if one.predicted_sent[axis] or one.traced_sent[axis]
            ]
            found += _other_lines(one)
        found += [f"  order of calls: {problem}" for problem in self.order_problems]
        more = self.whole_peak - max((one.predicted_peak for one in self.ranks), default=0.0)
        if more > 0.01 * self.whole_peak:
            further = self.of - self.micro_batches
            found.append(
                f"  the whole step's fullest rank is predicted at {self.whole_peak / 1e9:.3g} GB:"
                f" {more / 1e9:.3g} GB more, of {further} further micro-batches' buffers, not traced"
            )
        return found


def _other_lines(one: RankProof) -> list[str]:
    """Types that travel, calls, kernels and reads of a rank."""
    types = [
        f"{axis} {kind} {size / 1e9:.3g} GB"
        for axis, by_type in one.sent_by_type.items()
        for kind, size in by_type.items()
        if size
    ]
    found = [f"    by type: {', '.join(types)}"] if types else []
    found.append(
        f"    {counted(one.collectives, 'collective')}, {counted(one.messages, 'message')},"
        f" {counted(one.kernels, 'operator')} that launch kernels,"
        f" {counted(sum(one.reads.values()), 'read')} by the host"
    )
    most = sorted(one.reads.items(), key=lambda pair: (-pair[1], pair[0]))
    return found + [f"      read at {place}{f', {count} times' * (count > 1)}" for place, count in most]


def prove(job: JobConfig, layout: Layout) -> PlanProof:
    """Step the layout's engine with fake tensors, and hold the model's bytes against what is counted.

    Long steps are stepped in part, and predicted so: of a pipeline twice as many micro-batches as it has
    ranks, else `PASSES`.

    Raises:
        LayoutError: the layout cannot be applied, or rows are tasks.
    """
    if job.meta.on:
        text = "whose rows are tasks: no fake tensors step those; plan without --dry-run"
        raise LayoutError(f"meta.strategy: saw {job.meta.strategy}, {text}")
    overlap = {"tp_overlap": overlap_method(job, job.cluster.device, layout)}  # what the plan's device does
    cluster = job.cluster.model_copy(update={"device": "cpu"})
    job = job.model_copy(update={"cluster": cluster, "kernels": job.kernels.model_copy(update=overlap)})
    whole = layout.micro_batches(job.data.global_batch)
    count, ranks = min(whole, PASSES * layout.pp), _ranks(job, layout)
    peak = max(_predicted(job, layout, rank) for rank in range(layout.pp))
    if count < whole and not layout.replica_rows and not job.layout.actions:
        rows = layout.dp * layout.micro_batch * count
        job = job.model_copy(update={"data": job.data.model_copy(update={"global_batch": rows})})
    worlds = {rank: rank * layout.world_size // layout.pp for rank in ranks}
    stepped = {rank: dry_run(job, layout, world) for rank, world in worlds.items()}
    proofs = tuple(_rank_proof(job, layout, rank, found) for rank, found in stepped.items())
    wrong = order_problems({worlds[rank]: found.all_calls for rank, found in stepped.items()})
    return PlanProof(proofs, layout.micro_batches(job.data.global_batch), whole, peak, tuple(wrong))


def _ranks(job: JobConfig, layout: Layout) -> list[int]:
    if layout.pp <= MOST_RANKS:
        return list(range(layout.pp))
    fullest = max(range(layout.pp), key=lambda rank: _predicted(job, layout, rank))
    return sorted({layout.first_stage_rank, fullest, layout.last_stage_rank})


def _predicted(job: JobConfig, layout: Layout, rank: int) -> float:
    return rank_memory(job, layout, rank, blocks_again(job, layout, rank)).total_bytes


def _rank_proof(job: JobConfig, layout: Layout, rank: int, found: DryRun) -> RankProof:
    messages = sum(call.message for call in found.calls)
    return RankProof(
        rank=rank,
        predicted_peak=_predicted(job, layout, rank),
        traced_peak=found.peak_bytes,
        predicted_sent=sent_bytes(job, layout, rank),
        traced_sent=_by_axis(found),
        sent_by_type=found.sent_bytes,
        collectives=len(found.calls) - messages,
        messages=messages,
        kernels=sum(found.kernels.values()),
        reads=found.reads,
    )


def _by_axis(found: DryRun) -> dict[str, float]:
    """Bytes by `AXES`; those of the whole world (norms and the loss) count with the replicas."""
    sent = dict.fromkeys(AXES, 0.0)
    for axis, size in found.sent_bytes_by_axis.items():
        sent[axis if axis in ("tp", "pp") else "replicas"] += size
    return sent
