"""RMSNorm over a width that tensor parallelism cuts: every rank holds some columns, and all are one norm.

A norm of each head needs nothing from other ranks. One over all heads together does: the sum of squares of a
token is that of all ranks. It is one number per token, summed over the group once in each pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from picotron_ray.comm.all_reduce import Group, all_sum


class _CutNorm(torch.autograd.Function):
    """``y = x r w`` with ``r = (mean(x²) + eps)^-1/2`` over all columns; ``x [..., n]`` are some of them.

    With ``g`` the gradient of ``y``: that of ``x`` is ``r (g w - x r² mean(g x w))``, the mean over all
    columns again, and that of ``w`` the sum of ``g x r`` over rows, of this rank's columns alone. Nothing
    that is saved is written to: pipeline schedules that split the backward pass run it twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, width: int, group: Group) -> Tensor:
        squares = all_sum(x.square().sum(dim=-1, keepdim=True), group)
        root = squares.div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, root)
        ctx.width, ctx.group = width, group
        return (x * root).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, root = ctx.saved_tensors
        of_weight = (gradient * x).mul_(root).sum_to_size(weight.shape)
        scaled = gradient * weight
        turned = all_sum((scaled * x).sum(dim=-1, keepdim=True), ctx.group)
        turned.mul_(root).mul_(root).div_(-ctx.width)
        return scaled.addcmul_(x, turned).mul_(root), of_weight, None, None, None


def cut_rms_norm(x: Tensor, weight: Tensor, eps: float, width: int, group: Group) -> Tensor:
    """RMSNorm of which this rank holds some columns; computed in fp32 or wider, in the type of ``x``.

    Args:
        x: ``[..., n]``, this rank's columns; rows are the same on every rank.
        weight: ``[n]``, of the same columns.
        width: columns of all ranks together.
        group: ranks that hold the others.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    found: Tensor = _CutNorm.apply(x.to(wide), weight.to(wide), eps, width, group)
    return found.to(x.dtype)
