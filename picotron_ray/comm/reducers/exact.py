"""Exact sums by the backend's own collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.reducer import Reduction
from picotron_ray.comm.renamed import all_gather_single, reduce_scatter_single
from picotron_ray.comm.wire_bytes import GRADIENTS, SENT, ring_share


class AllReduce:
    """All-reduce of the backend, which travels beside the backward pass."""

    overlaps = True
    exact = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()

    def start(
        self, flat: Tensor, shapes: Sequence[torch.Size], feedback: Feedback | None, step: int
    ) -> Reduction:
        """Start the collective."""
        SENT.add(GRADIENTS, 2 * ring_share(flat.numel() * flat.element_size(), self._ranks))
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        return work


class ReduceScatterGather:
    """Reduce-scatter beside the backward pass, then an all-gather.

    gloo's own reduce-scatter is an all-reduce of everything. There the parts are exchanged and added here.
    """

    overlaps = True
    exact = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()
        self._by_parts = dist.get_backend(group) == "gloo"

    def start(
        self, flat: Tensor, shapes: Sequence[torch.Size], feedback: Feedback | None, step: int
    ) -> Reduction:
        """Start the reduce-scatter."""
        return _ScatteredSum(flat, self._group, self._ranks, self._by_parts)


class _ScatteredSum:
    def __init__(self, flat: Tensor, group: dist.ProcessGroup, ranks: int, by_parts: bool) -> None:
        self._flat, self._group, self._by_parts = flat, group, by_parts
        self._padded = padded(flat, ranks)
        share = ring_share(self._padded.numel() * flat.element_size(), ranks)
        SENT.add(GRADIENTS, 2 * share)
        part = self._padded.numel() // ranks
        if by_parts:
            self._received = torch.empty_like(self._padded).view(ranks, part)
            work = dist.all_to_all_single(
                self._received, self._padded.view(ranks, part), group=group, async_op=True
            )
        else:
            self._received = flat.new_empty(part)
            work = reduce_scatter_single(self._received, self._padded, group=group, async_op=True)
        self._work = work

    def wait(self) -> None:
        """Wait for this rank's part of the sum, and gather all parts."""
        self._work.wait()
        mine = self._received.sum(dim=0) if self._by_parts else self._received
        all_gather_single(self._padded, mine, group=self._group)
        if self._padded is not self._flat:
            self._flat.copy_(self._padded[: self._flat.numel()])


def padded(flat: Tensor, multiple: int) -> Tensor:
    """``flat`` with zeros up to a multiple of elements; itself where it is one."""
    missing = -flat.numel() % multiple
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
