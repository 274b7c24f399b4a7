"""Global gradient norm, correct on any mix of meshes, and clipping by it without a look from the host.

torch's ``clip_grad_norm_`` fails where gradients live on different meshes (pytorch#180346). Here each box is
counted by one rank of the world, however it is replicated or cut (``shard_boxes.counts_in_norm``). Each rank
squares the local boxes that it counts, and one number is summed over the world. Purely replicated layouts
need no communication, because all ranks hold the same reduced gradients, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.layout.layout import Layout


def squared_sum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, fp64 scalar."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(tensors))
    return torch.stack(norms).double().square().sum()


def global_norm(
    local: Sequence[Tensor],
    counted: Sequence[bool],
    layout: Layout,
    device: torch.device,
    on_wait: Callable[[bool], None] = lambda waits: None,
) -> Tensor:
    """Euclidean norm of the whole gradient, fp64 scalar on the device, the same number on every rank.

    Args:
        local: reduced local gradients of this rank.
        counted: for each, whether this rank counts it; not used where every rank holds everything.
        on_wait: called with True before it waits for other ranks, and with False afterwards.
    """
    if all_alike(layout):
        return squared_sum(local, device).sqrt()
    total = squared_sum([t for t, mine in zip(local, counted, strict=True) if mine], device)
    on_wait(True)
    dist.all_reduce(total)
    on_wait(False)
    return total.sqrt()


class PartSums:
    """Sums over ``count`` parts of the gradient, the same on every rank.

    Which element of a sum a gradient adds to stays on the device: made anew, it would be copied there in each
    step.

    Args:
        counted: as of `global_norm`.
        parts: for each local gradient the index of its part, or -1.
    """

    def __init__(
        self,
        counted: Sequence[bool],
        parts: Sequence[int],
        count: int,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._alike, self._count, self._device = all_alike(layout), count, device
        self._chosen = [i for i, part in enumerate(parts) if part >= 0 and (self._alike or counted[i])]
        self._part = torch.tensor([parts[i] for i in self._chosen], dtype=torch.long, device=device)

    def of(
        self,
        local: Sequence[Tensor],
        further: Callable[[Tensor], Tensor] | None = None,
        columns: int = 0,
    ) -> Tensor:
        """Return ``[count, 1 + columns]`` fp64 on the device: squares, and what is further.

        Args:
            local: as of `global_norm`.
            further: sums ``[columns]`` of one gradient's elements, fp64 on the device.
        """
        sums = torch.zeros((self._count, 1 + columns), dtype=torch.float64, device=self._device)
        if self._chosen:
            norms = torch._foreach_norm([local[i] for i in self._chosen])
            found = torch.stack(norms).double().square().unsqueeze(-1)
            if further is not None:
                found = torch.cat((found, torch.stack([further(local[i]) for i in self._chosen])), dim=-1)
            sums.index_add_(0, self._part, found)
        if not self._alike:
            dist.all_reduce(sums)
        return sums


def all_alike(layout: Layout) -> bool:
    """Whether every rank holds the whole gradient."""
    return layout.world_size == layout.replicas and layout.ep == 1 and not layout.zero


def clip_(local: Sequence[Tensor], norm: Tensor, largest: float) -> None:
    """Scale the gradients so that their global norm is at most ``largest`` (as torch: eps 1e-6).

    Gradients whose norm is not finite stay as they are. On CPUs those that are small enough are not gone
    through; elsewhere the host does not wait to know.
    """
    if not local or largest == math.inf:  # a rank may hold nothing at all
        return
    scale = torch.where(norm.isfinite(), (largest / (norm + 1e-6)).clamp(max=1.0), 1.0)
    if scale.device.type != "cpu" or scale < 1.0:
        torch._foreach_mul_(list(local), scale.to(local[0].dtype))
