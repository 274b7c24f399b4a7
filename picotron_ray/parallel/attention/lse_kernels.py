"""Attention kernels with log-sum-exp, so that results over parts of a row can be merged.

They take ``q [batch, heads, queries, head]`` and ``k, v [batch, kv_heads, keys, head]`` (query head i reads
keys of head ``i // (heads / kv_heads)``; nothing is repeated for it), and scale by ``1 / sqrt(head)``. They
return ``out`` like q and ``lse [batch, heads, queries]`` (natural logarithm; in fp32 for half precision, else
in q's dtype). Gradients of keys and values come summed over the query heads that share them.

What a query sees is said by a `KeyMask`: causality, a window, documents. A kernel that knows none of these
gets them as a mask of all scores, made when it is used. FlashAttention (``lse_flash``) needs none.

A query without a visible key has ``lse`` -inf and ``out`` 0, so that it adds nothing to a merge.

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
from picotron_ray.parallel.attention.tile_documents import TileDocuments

Forward = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


class KeyMask(NamedTuple):
    """Keys that each query sees. The last query and the last key are taken to be neighbours.

    That is FlashAttention's convention ("bottom right"), by which it counts windows; where other tokens lie
    between the keys and the queries, ``left`` is as much less.

    Fields:
        causal: whether keys after a query are hidden from it; there are as many keys as queries then.
        left: how far a query looks back at most, in keys before its neighbour; None: to the first.
        documents: of queries and keys; None: all are of one. Without ``causal``, all keys lie before all
            queries.
    """

    causal: bool
    left: int | None = None
    documents: TileDocuments | None = None

    @property
    def plain(self) -> bool:
        """Whether causality is all that it says."""
        return self.left is None and self.documents is None

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Make a mask: bool ``[batch or 1, 1, queries, keys]``, true for visible keys; None: all are."""
        seen = None
        if self.causal or self.left is not None:
            at = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
            back = at - torch.arange(keys, device=device)
            seen = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
            if self.left is not None:
                seen = seen & (back <= self.left)
            seen = seen.unsqueeze(0).unsqueeze(0)
        if self.documents is not None:
            same = self.documents.same
            seen = same if seen is None else seen & same
        return seen


class LseKernel(ABC):
    """Attention kernel with log-sum-exp; see the module for shapes.

    Fields:
        counts_documents: whether it asks how many documents there are, which the host has to wait for.
    """

    counts_documents = False

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        """``(out, lse)``."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        """Gradients of q, k and v."""


class EqualHeadsKernel(LseKernel):
    """Kernel of an operator that takes as many key heads as query heads.

    Query heads that share keys take turns: the first of every group, then the second. So keys are read
    where they lie, in a call per member of a group.
    """

    @abstractmethod
    def equal_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Forward:
        """`forward` with a mask (`KeyMask.dense`), or causality alone."""

    @abstractmethod
    def equal_backward(
        self, saved: tuple[Tensor, ...], k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
    ) -> Gradients:
        """`backward` with ``saved``: (grad, q, out, lse)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        seen, members = self._seen(q, k, key_mask), q.size(1) // k.size(1)
        if members == 1:
            return self.equal_forward(q, k, v, *seen)
        parts = [self.equal_forward(part, k, v, *seen) for part in _members(q, members)]
        outs, levels = zip(*parts, strict=True)
        return torch.stack(outs, dim=2).flatten(1, 2), torch.stack(levels, dim=2).flatten(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        seen, members = self._seen(q, k, key_mask), q.size(1) // k.size(1)
        saved = (grad, q, out, lse)
        if members == 1:
            return self.equal_backward(saved, k, v, *seen)
        parts = zip(*(_members(x, members) for x in saved), strict=True)
        dq, dk, dv = zip(*(self.equal_backward(part, k, v, *seen) for part in parts), strict=True)
        return torch.stack(dq, dim=2).flatten(1, 2), _sum(dk), _sum(dv)

    @staticmethod
    def _seen(q: Tensor, k: Tensor, key_mask: KeyMask) -> tuple[bool, Tensor | None]:
        if key_mask.plain:
            return key_mask.causal, None
        return False, key_mask.dense(q.size(-2), k.size(-2), q.device)


def _members(x: Tensor, count: int) -> list[Tensor]:
    """``[batch, heads, ...]`` → the first head of every group of ``count``, the second, and so on."""
    parts = x.unflatten(1, (-1, count)).unbind(dim=2)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    """Sum in fp32 or wider, in the type of the parts."""
    total = parts[0].to(wide(parts[0]))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def wide(x: Tensor) -> torch.dtype:
    """The type in which results over parts of keys are added up: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask to add to scores: 0 where ``mask`` is true, -inf elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


class MathKernel(LseKernel):
    """Reference kernel: the formulas, with the whole score matrix in memory, on any device and dtype.

    Query heads that share keys are further rows of one product.

    Args:
        softcap: bound of scores (``models.layers.softcap``); None: there is none.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def _all_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """``[batch, heads, queries, keys]``."""
        found = _rows(q.to(wide(q)), k) @ k.to(wide(q)).transpose(-1, -2) / math.sqrt(q.size(-1))
        scores = found.view(*q.shape[:-1], k.size(-2))
        return scores if self._softcap is None else softcap(scores, self._softcap)

    def _visible(self, scores: Tensor, key_mask: KeyMask) -> Tensor:
        mask = key_mask.dense(scores.size(-2), scores.size(-1), scores.device)
        return scores if mask is None else scores.masked_fill(mask.logical_not(), float("-inf"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        scores = self._visible(self._all_scores(q, k), key_mask)
        lse = scores.logsumexp(dim=-1)
        # -inf - (-inf) is NaN: a query without a visible key gets weights exp(-inf - 0) = 0
        weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
        return (_rows(weights, k) @ v.to(weights.dtype)).view_as(q).to(q.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        scores = self._all_scores(q, k)
        weights = (self._visible(scores, key_mask) - lse.unsqueeze(-1)).exp()
        dtype, scale = weights.dtype, 1 / math.sqrt(q.size(-1))
        above = grad.to(dtype)
        share = (_rows(above, k) @ v.to(dtype).transpose(-1, -2)).view_as(weights)
        share = weights * (share - (above * out.to(dtype)).sum(dim=-1, keepdim=True)) * scale
        if self._softcap is not None:
            share = share * (1 - (scores / self._softcap).square())
        of_keys, of_values = (_rows(x, k).transpose(-1, -2) for x in (share, weights))
        dq = (_rows(share, k) @ k.to(dtype)).view_as(q)
        dk, dv = of_keys @ _rows(q.to(dtype), k), of_values @ _rows(above, k)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rows(x: Tensor, k: Tensor) -> Tensor:
    """``[batch, heads, queries, n]`` → ``[batch, kv_heads, queries of all heads that share keys, n]``."""
    return x.reshape(x.size(0), k.size(1), -1, x.size(-1))


class CpuFlash(EqualHeadsKernel):
    """Torch's flash attention for CPUs: fp64, fp32, bf16 and fp16."""

    def equal_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Forward:
        bias = None if mask is None else additive_mask(mask, q.dtype)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, causal, attn_mask=bias)
        if mask is not None:  # torch says 0, the log of a sum of 1, for a query without a visible key
            lse = lse.masked_fill(~mask.any(dim=-1), float("-inf"))
        return out, lse

    def equal_backward(
        self, saved: tuple[Tensor, ...], k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
    ) -> Gradients:
        grad, q, out, lse = saved
        bias = None if mask is None else additive_mask(mask, q.dtype)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias)
        return dq, dk, dv
