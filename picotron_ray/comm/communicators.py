"""Communicators of a generation: made in one place, at once and in one order on all ranks.

Under gloo the members of a group meet alone. NCCL splits the groups of an axis off the default one, by a call
of all ranks (``ncclCommSplit``): no rendezvous of their own. Each has buffers of its own.

The first operation of a communicator must be one of all its ranks: NCCL connects them by it. Where it is a
message between two (a pipeline's first activation, gradients of an embedding tied over three or more stages)
the others would be waited for without end. So every communicator begins with a sum of one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class Communicators:
    """Communicators of one rank, in the order in which they are made; `warm` ends their making.

    Args:
        world_size: ranks of the generation. One alone needs none.
        timeout: time limit of a collective.
        device: of what is sent.

    Fields:
        made: their uses, in words, one for each.
    """

    def __init__(self, world_size: int, timeout: timedelta | None, device: torch.device) -> None:
        self._world_size, self._timeout, self._device = world_size, timeout, device
        self._groups: list[dist.ProcessGroup] = []
        self.made: list[str] = []
        if world_size > 1:
            self._add(dist.group.WORLD, "world")

    def _add(self, group: dist.ProcessGroup | None, use: str) -> dist.ProcessGroup:
        assert group is not None, "this rank is in one part"
        self._groups.append(group)
        self.made.append(use)
        return group

    def of(self, use: str, rank: int, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Make the group of this rank; all ranks call it in the same order.

        Args:
            parts: the ranks of all groups of this use, which share no rank and leave none out.
        """
        mine = next(list(part) for part in parts if rank in part)
        if len(mine) == self._world_size:
            return self._groups[0]
        if dist.get_backend() == "nccl":
            ranks = [list(part) for part in parts]
            return self._add(dist.split_group(None, ranks, self._timeout, group_desc=use), use)
        group = dist.new_group(mine, timeout=self._timeout, use_local_synchronization=True)
        return self._add(group, use)

    def warm(self) -> None:
        """Use each communicator for the first time, by all of its ranks."""
        for group in self._groups:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
