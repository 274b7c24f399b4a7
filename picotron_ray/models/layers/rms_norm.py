"""RMSNorm (Zhang & Sennrich 2019) by torch's operator, or with its gradient written down.

On CUDA torch has a kernel for it. On CPUs its operator is a chain of others, each with a backward pass of its
own that keeps what it needs: several times the traffic of what follows here, and twice the memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _ClosedForm(torch.autograd.Function):
    """``y = x r w`` with ``r = (mean(x²) + eps)^-1/2``, of each row of ``x [..., n]``, in the type of ``x``.

    It computes in fp32 or wider, and keeps ``x`` as it comes. With ``g`` the gradient of ``y``: that of ``w``
    is the sum of ``g x r`` over rows, and that of ``x`` is ``r (g w - x r² mean(g x w))``. Nothing that is
    saved is written to: pipeline schedules that split the backward pass run it twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_().div_(x.size(-1))
        root.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, root)
        return (x * root).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, root = ctx.saved_tensors
        x, weight, gradient = x.to(root.dtype), weight.to(root.dtype), gradients[0].to(root.dtype)
        width = x.size(-1)
        found = torch.mul(gradient, x, out=torch.empty_like(x))  # in rows, whatever the gradient lies in
        turned = torch.mv(found.view(-1, width), weight).view_as(root)
        turned.mul_(root).mul_(root).div_(-width)
        of_weight = found.mul_(root).view(-1, width).sum(dim=0)
        torch.mul(gradient, weight, out=found)
        return found.addcmul_(x, turned).mul_(root), of_weight, None  # autograd casts them


def closed_form(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of ``x [..., n]``, computed in fp32 or wider, in the type of ``x``."""
    found: Tensor = _ClosedForm.apply(x.contiguous(), weight, eps)
    return found


class RMSNorm(nn.RMSNorm):
    """See the module.

    Fields:
        closed: whether its gradient is the one written down here.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.closed = False

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` → the same."""
        if not self.closed:
            return super().forward(x)
        assert self.eps is not None
        return closed_form(x, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, so that weights begin at zero (Gemma).

    The sum is made in fp32 or wider: in 16 bits small weights would be lost beside 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` → the same."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight = 1 + self.weight.to(wide)
        if not self.closed:
            return F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps).to(x.dtype)
        assert self.eps is not None
        return closed_form(x, weight, self.eps)


def closed_added_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As `models.layers.pointwise.added_norm` of RMSNorm, with the gradient written down."""
    assert bias is None
    total = x + y
    return total, closed_form(total, weight, eps)
