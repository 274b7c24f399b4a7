"""CUDA attention kernels with log-sum-exp: torch's operators behind scaled_dot_product_attention.

A merge needs two things that the public function hides: the log-sum-exp, and a backward pass that takes the
whole row's. So these operators are private. ``native_functions.yaml`` of torch 2.11 to 2.13 declares them
alike. The form of their results was read in ``aten/src/ATen/native/transformers/cuda``. tests/gpu compares
them with the formulas.

flash-attn is not among them. Its function for a backward pass with a given log-sum-exp is private, and its
arguments have changed within the versions that we support.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_ray.config.support.kernels import Backend
from picotron_ray.errors import LayoutError
from picotron_ray.parallel.attention.lse_kernels import (
    CpuFlash,
    Forward,
    Gradients,
    KeyMask,
    LseKernel,
    MathKernel,
)

NO_MASK = "kernels.attention: saw {}, which takes no document masks in parts of rows; use auto or efficient"
LSE_MULTIPLE = 32
"""Multiple to which the efficient kernel pads the queries of its log-sum-exp (``kAlignLSE``)."""
BIAS_MULTIPLE = 16
"""Alignment of the rows of its bias, in elements: at least 16 bytes in every type."""


class CudaFlash(LseKernel):
    """FlashAttention-2 as torch ships it: bf16 and fp16, heads of a multiple of 8; no masks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        if key_mask.mask is not None:
            raise LayoutError(NO_MASK.format("flash"))
        op = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = op(q, k, v, 0.0, key_mask.causal, return_debug_mask=False)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        # without dropout the random state is not read; the lengths of packed rows are not used either
        seed, offset = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))
        op = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = op(
            grad, q, k, v, out, lse, None, None, q.size(-2), k.size(-2), 0.0, key_mask.causal, seed, offset
        )
        return dq, dk, dv


class CudaCudnn(LseKernel):
    """cuDNN's attention: bf16 and fp16, heads of a multiple of 8; no masks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        if key_mask.mask is not None:
            raise LayoutError(NO_MASK.format("cudnn"))
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(q, k, v, None, True, 0.0, key_mask.causal, False)
        return out, lse.reshape(q.shape[:-1])  # it has a last dimension of 1

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # for dropout, which is off
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        lengths = (None, None, q.size(-2), k.size(-2))
        dq, dk, dv = op(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, *lengths, 0.0, key_mask.causal
        )
        return dq, dk, dv


class CudaEfficient(LseKernel):
    """Memory-efficient attention (Rabe & Staats 2021): bf16, fp16 and fp32, heads of a multiple of 16 bytes.

    Masks are added to scores. One stands for all heads, so that it is small beside the scores.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = op(q, k, v, _bias(key_mask, q), True, 0.0, key_mask.causal)
        lse = lse.narrow(-1, 0, q.size(-2))
        if key_mask.mask is not None:  # it says 0, the log of a sum of 1, for a query without a visible key
            lse = lse.masked_fill(key_mask.mask.any(dim=-1).logical_not(), float("-inf"))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        seed = torch.zeros((), dtype=torch.int64)  # for dropout, which is off; on the host, as forward's
        lse = F.pad(lse, (0, -lse.size(-1) % LSE_MULTIPLE), value=float("inf"))  # no weight, as forward pads
        # the kernel takes out to lie token by token and does not look at its strides
        out = out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        wanted = (True, True, True, False)  # not the bias's
        dq, dk, dv, _ = op(
            grad, q, k, v, _bias(key_mask, q), out, lse, seed, seed, 0.0, wanted, key_mask.causal
        )
        return dq, dk, dv


def _bias(key_mask: KeyMask, q: Tensor) -> Tensor | None:
    """Additive mask ``[batch, heads, queries, keys]``, with aligned rows, one mask for all heads."""
    if key_mask.mask is None:
        return None
    batch, _, queries, keys = key_mask.mask.shape
    bias = q.new_zeros(batch, 1, queries, keys + -keys % BIAS_MULTIPLE).narrow(-1, 0, keys)
    return bias.masked_fill_(key_mask.mask.logical_not(), float("-inf")).expand(-1, q.size(1), -1, -1)


def lse_kernel(backend: Backend, device: torch.device, softcap: float | None = None) -> LseKernel:
    """The kernel of that name with log-sum-exp; LookupError where it has none, or caps no scores.

    Args:
        softcap: bound of scores; None: there is none.
    """
    if softcap is not None:
        return {"math": MathKernel}[backend](softcap)
    cpu: dict[str, type[LseKernel]] = {"math": MathKernel, "flash": CpuFlash}
    cuda: dict[str, type[LseKernel]] = {
        "math": MathKernel,
        "flash": CudaFlash,
        "efficient": CudaEfficient,
        "cudnn": CudaCudnn,
    }
    return (cpu if device.type == "cpu" else cuda)[backend]()
