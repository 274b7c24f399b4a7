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
    if _all_alike(layout):
        return squared_sum(local, device).sqrt()
    total = squared_sum([t for t, mine in zip(local, counted, strict=True) if mine], device)
    on_wait(True)
    dist.all_reduce(total)
    on_wait(False)
    return total.sqrt()


def part_norms(
    local: Sequence[Tensor],
    counted: Sequence[bool],
    parts: Sequence[int],
    count: int,
    layout: Layout,
    device: torch.device,
) -> list[float]:
    """Norms of ``count`` parts of the gradient, the same on every rank; arguments as of `global_norm`.

    Args:
        parts: for each local gradient the index of its part, or -1.
    """
    alike = _all_alike(layout)
    chosen = [i for i, part in enumerate(parts) if part >= 0 and (alike or counted[i])]
    squares = torch.zeros(count, dtype=torch.float64, device=device)
    if chosen:
        found = torch.stack(torch._foreach_norm([local[i] for i in chosen])).double().square()
        squares.index_add_(0, torch.tensor([parts[i] for i in chosen], device=device), found)
    if not alike:
        dist.all_reduce(squares)
    norms: list[float] = squares.sqrt().tolist()
    return norms


def _all_alike(layout: Layout) -> bool:
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
