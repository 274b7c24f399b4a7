"""CUDA attention kernels with log-sum-exp: torch's operators behind scaled_dot_product_attention.

A merge needs two things that the public function hides: the log-sum-exp, and a backward pass that takes the
whole row's. So these operators are private. ``native_functions.yaml`` of torch 2.11 to 2.13 declares them
alike. The form of their results was read in ``aten/src/ATen/native/transformers/cuda``. tests/gpu compares
them with the formulas. FlashAttention has modules of its own (``lse_flash``, ``flash_operators``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_ray.config.support.kernels import Backend
from picotron_ray.errors import LayoutError
from picotron_ray.parallel.attention.flash_operators import PackageFlash, TorchFlash
from picotron_ray.parallel.attention.lse_flash import FlashKernel
from picotron_ray.parallel.attention.lse_kernels import (
    CpuFlash,
    EqualHeadsKernel,
    Forward,
    Gradients,
    LseKernel,
    MathKernel,
)

NO_MASK = (
    "kernels.attention: saw cudnn, which takes neither document masks nor windows in parts of rows; use auto"
)
LSE_MULTIPLE = 32
"""Multiple to which the efficient kernel pads the queries of its log-sum-exp (``kAlignLSE``)."""
BIAS_MULTIPLE = 16
"""Alignment of the rows of its bias, in elements: at least 16 bytes in every type."""


class CudaCudnn(EqualHeadsKernel):
    """cuDNN's attention: bf16 and fp16, heads of a multiple of 8; no masks."""

    def equal_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Forward:
        if mask is not None:
            raise LayoutError(NO_MASK)
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, False)
        return out, lse.reshape(q.shape[:-1])  # it has a last dimension of 1

    def equal_backward(
        self, saved: tuple[Tensor, ...], k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
    ) -> Gradients:
        grad, q, out, lse = saved
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # for dropout, which is off
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        lengths = (None, None, q.size(-2), k.size(-2))
        dq, dk, dv = op(grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, *lengths, 0.0, causal)
        return dq, dk, dv


class CudaEfficient(EqualHeadsKernel):
    """Memory-efficient attention (Rabe & Staats 2021): bf16, fp16 and fp32, heads of a multiple of 16 bytes.

    Masks are added to scores. One stands for all heads, so that it is small beside the scores.
    """

    def equal_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Forward:
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = op(q, k, v, _bias(mask, q, k), True, 0.0, causal)
        lse = lse.narrow(-1, 0, q.size(-2))
        if mask is not None:  # it says 0, the log of a sum of 1, for a query without a visible key
            lse = lse.masked_fill(mask.any(dim=-1).logical_not(), float("-inf"))
        return out, lse

    def equal_backward(
        self, saved: tuple[Tensor, ...], k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
    ) -> Gradients:
        grad, q, out, lse = saved
        seed = torch.zeros((), dtype=torch.int64)  # for dropout, which is off; on the host, as forward's
        lse = F.pad(lse, (0, -lse.size(-1) % LSE_MULTIPLE), value=float("inf"))  # no weight, as forward pads
        # the kernel takes out to lie token by token and does not look at its strides
        out = out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        wanted = (True, True, True, False)  # not the bias's
        dq, dk, dv, _ = op(grad, q, k, v, _bias(mask, q, k), out, lse, seed, seed, 0.0, wanted, causal)
        return dq, dk, dv


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Additive mask ``[batch, heads, queries, keys]``, with aligned rows, one mask for all heads."""
    if mask is None:
        return None
    keys = k.size(-2)
    bias = q.new_zeros(mask.size(0), 1, q.size(-2), keys + -keys % BIAS_MULTIPLE).narrow(-1, 0, keys)
    return bias.masked_fill_(mask.logical_not(), float("-inf")).expand(q.size(0), q.size(1), -1, -1)


def lse_kernel(backend: Backend, device: torch.device, softcap: float | None = None) -> LseKernel:
    """Make the kernel of that name with log-sum-exp.

    Args:
        softcap: bound of scores; None: there is none.

    Raises:
        LookupError: it has none, or caps no scores.
        LayoutError: a package is missing or too old.
    """
    able: dict[str, Callable[[], LseKernel]] = {"math": lambda: MathKernel(softcap)}
    if device.type != "cpu":
        able["flash-attn"] = lambda: FlashKernel(PackageFlash(softcap))
    if softcap is None:
        able["flash"] = CpuFlash if device.type == "cpu" else lambda: FlashKernel(TorchFlash())
    if softcap is None and device.type != "cpu":
        able |= {"efficient": CudaEfficient, "cudnn": CudaCudnn}
    return able[backend]()
