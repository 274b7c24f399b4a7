"""Attention kernels with log-sum-exp, so that results over parts of a row can be merged.

They take ``q [batch, heads, queries, head]`` and ``k, v [batch, heads, keys, head]`` with as many heads, and
scale by ``1 / sqrt(head)``. They return ``out`` like q and ``lse [batch, heads, queries]`` (natural
logarithm; in fp32 for half precision, else in q's dtype). ``causal`` masks query i from keys after i; it
needs as many keys as queries.

Where rows hold several documents (``models.layers.document_mask``), a mask says which keys a query sees. A
query without a visible key has ``lse`` -inf and ``out`` 0, so that it adds nothing to a merge.

This module has the kernels of CPUs and of every device, ``lse_kernels_cuda`` those of CUDA. Attention over
whole rows, without merging, is in ``backends``.

The backward passes take the ``out`` and ``lse`` of the *whole* row of keys. With them, the gradients over
parts of the keys simply add up (Dao 2023, FlashAttention-2, section 3.1; Liu et al. 2023, Ring Attention).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from picotron_ray.models.layers.softcap import softcap

Forward = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


class KeyMask(NamedTuple):
    """Mask of the keys that each query sees.

    Fields:
        causal: whether keys after a query are hidden from it.
        mask: bool ``[batch, 1, queries, keys]``, true for visible keys. It includes causality, and
            ``causal`` is then false. None: all keys are visible, but for ``causal``.
    """

    causal: bool
    mask: Tensor | None = None


class LseKernel(ABC):
    """Attention kernel with log-sum-exp; see the module for shapes."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        """``(out, lse)``."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        """Gradients of q, k and v."""


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask to add to scores: 0 where ``mask`` is true, -inf elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


class MathKernel(LseKernel):
    """Reference kernel: the formulas, with the whole score matrix in memory, on any device and dtype.

    Args:
        softcap: bound of scores (``models.layers.softcap``); None: there is none.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def _all_scores(self, q: Tensor, k: Tensor) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(q.size(-1))
        return scores if self._softcap is None else softcap(scores, self._softcap)

    def _visible(self, scores: Tensor, key_mask: KeyMask) -> Tensor:
        if key_mask.mask is not None:
            scores = scores.masked_fill(~key_mask.mask, float("-inf"))
        elif key_mask.causal:
            before = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~before, float("-inf"))
        return scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        scores = self._visible(self._all_scores(q, k), key_mask)
        lse = scores.logsumexp(dim=-1)
        # -inf - (-inf) is NaN: a query without a visible key gets weights exp(-inf - 0) = 0
        weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
        return (weights @ v.to(weights.dtype)).to(q.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        scores = self._all_scores(q, k)
        weights = (self._visible(scores, key_mask) - lse.unsqueeze(-1)).exp()
        dtype, scale = weights.dtype, 1 / math.sqrt(q.size(-1))
        wide = grad.to(dtype)
        share = wide @ v.to(dtype).transpose(-1, -2)
        share = weights * (share - (wide * out.to(dtype)).sum(dim=-1, keepdim=True)) * scale
        if self._softcap is not None:
            share = share * (1 - (scores / self._softcap).square())
        dq, dk = share @ k.to(dtype), share.transpose(-1, -2) @ q.to(dtype)
        return dq.to(q.dtype), dk.to(k.dtype), (weights.transpose(-1, -2) @ wide).to(v.dtype)


class CpuFlash(LseKernel):
    """Torch's flash attention for CPUs: fp64, fp32, bf16 and fp16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        bias = None if key_mask.mask is None else additive_mask(key_mask.mask, q.dtype)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, key_mask.causal, attn_mask=bias)
        if (
            key_mask.mask is not None
        ):  # torch says 0, the log of a sum of 1, for a query without a visible key
            lse = lse.masked_fill(~key_mask.mask.any(dim=-1), float("-inf"))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        bias = None if key_mask.mask is None else additive_mask(key_mask.mask, q.dtype)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, key_mask.causal, attn_mask=bias)
        return dq, dk, dv
