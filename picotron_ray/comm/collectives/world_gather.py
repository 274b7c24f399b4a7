"""Gather of a few numbers from all ranks of a generation, in two levels where there are many.

What all ranks must know grows with their number, and so do the rounds of a flat gather: R - 1, each a
latency. In two levels each rank first gathers from those at its place on the other nodes, then from its
neighbours, who have gathered from those at theirs: K - 1 and L - 1 rounds on K nodes of L ranks, with as many
bytes and the same order. A node's ranks follow each other, and all nodes have as many.

Who gathers knows the default group alone, so the two levels are assigned once in a generation, as `assigned`
collectives are.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.renamed import all_gather_single

MANY_RANKS = 64
"""Ranks of a generation from which on it has two levels."""


class TwoLevelGather:
    """Gather over neighbours and across neighbourhoods.

    Args:
        inside: this rank's neighbourhood.
        across: the ranks at this one's place in each neighbourhood.
    """

    def __init__(self, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        self._inside, self._across = inside, across

    @property
    def rounds(self) -> int:
        """Rounds of a gather, one after the other."""
        return self._inside.size() - 1 + self._across.size() - 1

    def gather_(self, out: Tensor, part: Tensor) -> None:
        """Fill ``out [ranks n]`` with the ``part [n]`` of every rank, in their order; contiguous both.

        What ``out`` holds before stays where nothing arrives: an aborted collective of NCCL may end silently.
        """
        places, nodes = self._inside.size(), self._across.size()
        by_place = out.reshape(-1).clone()
        of_place = by_place[: nodes * part.numel()].clone()
        all_gather_single(of_place, part.view(-1), group=self._across)
        all_gather_single(by_place, of_place, group=self._inside)
        ordered = by_place.view(places, nodes, part.numel()).transpose(0, 1)
        out.view(nodes, places, part.numel()).copy_(ordered)


_ASSIGNED: list[TwoLevelGather] = []


def assign_world(gather: TwoLevelGather) -> None:
    """Let `gather_world` go by ``gather``, until `withdraw_world`."""
    _ASSIGNED[:] = [gather]


def withdraw_world() -> None:
    """Forget the groups, before they are destroyed."""
    _ASSIGNED.clear()


def world_rounds(ranks: int) -> int:
    """Rounds of `gather_world` in a generation of so many ranks, one after the other."""
    return _ASSIGNED[0].rounds if _ASSIGNED else ranks - 1


def gather_world(out: Tensor, part: Tensor, group: Any = None) -> None:
    """Fill ``out [ranks n]`` with the ``part [n]`` of every rank; all ranks together.

    Args:
        group: other than the default one, which is gathered from at once.
    """
    if group is None and _ASSIGNED:
        _ASSIGNED[0].gather_(out, part)
    else:
        all_gather_single(out.view(-1), part.view(-1), group=group)
