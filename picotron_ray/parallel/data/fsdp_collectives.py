"""Collectives that FSDP2 calls, counted and chosen: gathers of weights, reduce-scatters of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from picotron_ray.comm.collectives.collectives import Collectives
from picotron_ray.comm.renamed import all_gather_single
from picotron_ray.comm.wire_bytes import SENT, ring_share, size_bytes


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class WeightGather(_Allocates):
    """FSDP2's ``AllGather`` of weights."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; work under way only where the backend's is asked for in the background."""
        if not async_op or self._collectives.plan.own:
            self._collectives.all_gather(output_tensor, input_tensor, group)
            return None
        SENT.add(self._collectives.purpose, ring_share(size_bytes(output_tensor), group.size()))
        return cast("dist.Work", all_gather_single(output_tensor, input_tensor, group=group, async_op=True))


class GradientScatter(_Allocates):
    """FSDP2's ``ReduceScatter`` of gradients: their sum. On gloo it sends half of what gloo's own does.

    Args:
        dtype: in which they travel, while FSDP adds them up over micro-batches in its own. None: in that.
    """

    def __init__(self, collectives: Collectives, dtype: torch.dtype | None = None) -> None:
        self._collectives, self._dtype = collectives, dtype

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum the parts; ``op`` is a sum, as `apply_fsdp` sets it."""
        assert op == dist.ReduceOp.SUM, "gradients are summed, never averaged"
        if self._dtype in (None, input_tensor.dtype):
            self._collectives.reduce_scatter(output_tensor, input_tensor, group)
            return None
        narrow = torch.empty_like(output_tensor, dtype=self._dtype)
        self._collectives.reduce_scatter(narrow, input_tensor.to(self._dtype), group)
        output_tensor.copy_(narrow)
        return None


def choose_collectives(
    model: torch.nn.Module,
    weights: Collectives,
    gradients: Collectives,
    reduce: torch.dtype | None = None,
) -> None:
    """Let FSDP's units in ``model`` communicate by these; `apply_fsdp` has made them.

    Args:
        reduce: see `GradientScatter`.
    """
    gather, scatter = WeightGather(weights), GradientScatter(gradients, reduce)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
