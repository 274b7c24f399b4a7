"""Choice of the reducer that a job asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.peers import CHUNK_BYTES, Peers
from picotron_ray.comm.reducers.codecs import Bf16, Quantized, TopK
from picotron_ray.comm.reducers.compressed import Compressed
from picotron_ray.comm.reducers.exact import AllReduce, ReduceScatterGather
from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.point_to_point import ALGORITHMS, TwoLevels
from picotron_ray.comm.reducers.powersgd import PowerSGD
from picotron_ray.comm.reducers.reducer import Deferred, Done, Reducer, Reduction

COMPRESSED = ("topk", "int8", "powersgd", "bf16")
"""Reductions whose result is not the exact sum."""
BUCKET_BYTES = 25 * 2**20
NO_LIMIT = 2**62
RATIOS = ((100e6, 0.1), (10e6, 0.3))
"""Bytes of gradients above which a ratio of compression holds, the largest first; 0.5 below."""


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """Travel of gradients, as a job asks for it.

    Fields:
        gradients: auto, flat, bucketed, overlapped, reduce-scatter, hierarchical, topk, int8, powersgd, bf16.
        topology: auto, ring, tree or mesh.
        ratio: bytes sent over bytes of the gradients, for topk and powersgd; None: by size (`RATIOS`).
        bits: of int8's codes.
        inner: neighbouring replicas of one neighbourhood, for hierarchical.
        bucket_bytes: limit of one bucket.
        chunk_bytes: limit of one message of an own algorithm.
        overlap: share of the buckets that may start during the backward pass.
    """

    gradients: str = "auto"
    topology: str = "auto"
    ratio: float | None = None
    bits: int = 8
    inner: int = 1
    bucket_bytes: int = BUCKET_BYTES
    chunk_bytes: int = CHUNK_BYTES
    overlap: float = 1.0

    @property
    def compressed(self) -> bool:
        """Whether something is left out, and fed back."""
        return self.gradients in COMPRESSED

    @property
    def bucket_limit(self) -> int:
        """Bytes of a bucket: no limit where all go at once."""
        return NO_LIMIT if self.gradients == "flat" else self.bucket_bytes

    @property
    def overlapped_share(self) -> float:
        """Share of the buckets that start during the backward pass."""
        return 0.0 if self.gradients in ("flat", "bucketed") else self.overlap

    def has_levels(self, ranks: int) -> bool:
        """Whether two levels are asked for and ``ranks`` are several whole neighbourhoods."""
        return self.gradients == "hierarchical" and 1 < self.inner < ranks and ranks % self.inner == 0

    def exact(self) -> ReductionPlan:
        """The plan of tensors that are not compressed."""
        return ReductionPlan(bucket_bytes=self.bucket_bytes, overlap=self.overlap)


class PointToPoint:
    """Reducer by an own algorithm; its rounds begin when the backward pass has ended."""

    overlaps = False
    exact = True

    def __init__(self, group: dist.ProcessGroup, plan: ReductionPlan) -> None:
        self._two_levels: TwoLevels | None = None
        algorithm = "ring" if plan.topology == "auto" else plan.topology
        if plan.has_levels(group.size()):
            self._two_levels = TwoLevels(group, plan.inner, algorithm, plan.chunk_bytes)
        self._algorithm, self._peers = ALGORITHMS[algorithm], Peers(group, None, plan.chunk_bytes)

    def start(
        self, flat: Tensor, shapes: Sequence[torch.Size], feedback: Feedback | None, step: int
    ) -> Reduction:
        """Begin when it is waited for: a round waits for the one before it."""
        return Deferred(flat, self._reduce)

    def _reduce(self, flat: Tensor) -> None:
        if self._two_levels is not None:
            self._two_levels.all_reduce_(flat)
        else:
            self._algorithm(flat, self._peers)


def ratio_for(total_bytes: int) -> float:
    """Ratio of compression for gradients of this size.

    >>> ratio_for(200_000_000), ratio_for(20_000_000), ratio_for(1000)
    (0.1, 0.3, 0.5)
    """
    return next((ratio for least, ratio in RATIOS if total_bytes > least), 0.5)


class Alone:
    """Reducer of one rank: what larger groups left owed goes into its next gradient, and nothing stays."""

    overlaps = False
    exact = False

    def start(
        self, flat: Tensor, shapes: Sequence[torch.Size], feedback: Feedback | None, step: int
    ) -> Reduction:
        """Add what is owed."""
        assert feedback is not None, "there is nothing else to do"
        feedback.add_to_(flat)
        feedback.keep(torch.zeros_like(flat))
        return Done()


def make_reducer(plan: ReductionPlan, group: dist.ProcessGroup | None, total_bytes: int) -> Reducer:
    """Make the reducer of a group's gradients, ``total_bytes`` in all; None: of one rank, if compressed.

    Two levels of one neighbourhood are the backend's all-reduce, which knows its links best.
    """
    if group is None:
        return Alone()
    ratio = ratio_for(total_bytes) if plan.ratio is None else plan.ratio
    match plan.gradients:
        case "topk":
            return Compressed(group, TopK(ratio))
        case "int8":
            return Compressed(group, Quantized(plan.bits))
        case "bf16":
            return Compressed(group, Bf16())
        case "powersgd":
            return PowerSGD(group, ratio)
    if plan.topology != "auto" or plan.has_levels(group.size()):
        return PointToPoint(group, plan)
    return ReduceScatterGather(group) if plan.gradients == "reduce-scatter" else AllReduce(group)
