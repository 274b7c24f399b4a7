"""Attention kernels: over whole rows, and with their log-sum-exp, so that results over parts can be merged.

The latter take ``q [batch, heads, queries, head]`` and ``k, v [batch, heads, keys, head]`` with as many
heads, scale by ``1 / sqrt(head)``, and give ``out`` like q and ``lse [batch, heads, queries]`` (natural
logarithm; in fp32 for half precision, else in q's dtype). ``causal`` masks query i from keys after i; it
needs as many keys as queries.

Where rows hold several documents (``models.documents``), a mask says which keys a query sees. A query of
which no key at hand is visible has ``lse`` -inf and ``out`` 0, so that it adds nothing to a merge.

The backward passes take the ``out`` and ``lse`` of the *whole* row of keys: with them, the gradients over
parts of the keys simply add up (Dao 2023, FlashAttention-2, section 3.1; Liu et al. 2023, Ring Attention).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron_ray.config.kernels import Backend
from picotron_ray.errors import LayoutError
from picotron_ray.models.documents import causal_within

Forward = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
NO_MASK = "kernels.attention: saw {}, which takes no document masks; use auto, or data.document_masks=false"


class Seen(NamedTuple):
    """Which keys at hand a query sees.

    Fields:
        causal: not those after it.
        mask: bool ``[batch, 1, queries, keys]``, true where it does; causality is in it where it matters, and
            ``causal`` false. None: all keys, but for ``causal``.
    """

    causal: bool
    mask: Tensor | None = None


class LseKernel(ABC):
    """One implementation; see the module."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Forward:
        """``(out, lse)``."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> Gradients:
        """Gradients of q, k and v."""


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to scores: 0 where it is true, -inf elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


class MathKernel(LseKernel):
    """The formulas, with the whole score matrix in memory: any device and dtype, for comparison."""

    def _scores(self, q: Tensor, k: Tensor, seen: Seen) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(q.size(-1))
        if seen.mask is not None:
            scores = scores.masked_fill(~seen.mask, float("-inf"))
        elif seen.causal:
            before = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~before, float("-inf"))
        return scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Forward:
        scores = self._scores(q, k, seen)
        lse = scores.logsumexp(dim=-1)
        # -inf less -inf is no number: a query that sees nothing gets weights exp(-inf - 0) = 0
        weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
        return (weights @ v.to(weights.dtype)).to(q.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> Gradients:
        weights = (self._scores(q, k, seen) - lse.unsqueeze(-1)).exp()
        dtype, scale = weights.dtype, 1 / math.sqrt(q.size(-1))
        wide = grad.to(dtype)
        share = wide @ v.to(dtype).transpose(-1, -2)
        share = weights * (share - (wide * out.to(dtype)).sum(dim=-1, keepdim=True)) * scale
        dq, dk = share @ k.to(dtype), share.transpose(-1, -2) @ q.to(dtype)
        return dq.to(q.dtype), dk.to(k.dtype), (weights.transpose(-1, -2) @ wide).to(v.dtype)


class CpuFlash(LseKernel):
    """torch's flash attention for CPUs: fp64, fp32, bf16 and fp16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Forward:
        bias = None if seen.mask is None else additive(seen.mask, q.dtype)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, seen.causal, attn_mask=bias)
        if seen.mask is not None:  # torch says 0, the log of a sum of 1, for a query that sees nothing
            lse = lse.masked_fill(~seen.mask.any(dim=-1), float("-inf"))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> Gradients:
        bias = None if seen.mask is None else additive(seen.mask, q.dtype)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, seen.causal, attn_mask=bias)
        return dq, dk, dv


class CudaFlash(LseKernel):
    """FlashAttention-2 as torch ships it: bf16 and fp16, heads of a multiple of 8; no masks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Forward:
        if seen.mask is not None:
            raise LayoutError(NO_MASK.format("flash"))
        op = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = op(q, k, v, 0.0, seen.causal, return_debug_mask=False)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> Gradients:
        # without dropout the random state is not read; the lengths of packed rows are not used either
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        op = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = op(
            grad, q, k, v, out, lse, None, None, q.size(-2), k.size(-2), 0.0, seen.causal, unused, unused[0]
        )
        return dq, dk, dv


def lse_kernel(backend: Backend, device: torch.device) -> LseKernel:
    """The kernel of that name with log-sum-exp; LookupError where it has none."""
    kernels = {"math": MathKernel, "flash": CpuFlash if device.type == "cpu" else CudaFlash}
    return kernels[backend]()


class _RowMask:
    """The mask of the documents at hand, made once for all layers that ask for it.

    It is found again by the numbers' own tensor, which a micro-batch keeps for its whole life: another one in
    flight, or a forward that runs again, can cost time here but never get another's mask.
    """

    def __init__(self) -> None:
        self._documents, self._mask = torch.empty(0), torch.empty(0)

    def of(self, documents: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to scores, ``[batch, 1, row, row]`` in their type, for numbers ``[batch, row]``."""
        if documents is not self._documents or dtype != self._mask.dtype:
            self._documents, self._mask = documents, additive(causal_within(documents), dtype)
        return self._mask


def whole_kernel(backend: Backend) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Causal attention over whole rows, by that implementation and no other.

    It takes ``q [batch, heads, seq, head]``, ``k, v [batch, kv_heads, seq, head]`` and the numbers of
    documents ``[batch, seq]`` or None, and raises RuntimeError where the implementation cannot: torch alone
    would use another without a word.
    """
    if backend == "flash-attn":
        return _flash_attn()
    chosen, row_mask = _TORCH[backend], _RowMask()
    shares_keys = backend in ("flash", "math")

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        bias = None if documents is None else row_mask.of(documents, q.dtype)
        grouped = k.size(1) != q.size(1)
        if grouped and not shares_keys:
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped and shares_keys
            )

    return attend


def _flash_attn() -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise LayoutError(
            "kernels.attention: saw flash-attn, which is not installed; pip install 'picotron-ray[flash]'"
        ) from error

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is not None:
            raise LayoutError(NO_MASK.format("flash-attn"))
        out: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return out.transpose(1, 2)

    return attend


_TORCH: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention of one model: which modules, by which implementation, over rows of how many tokens."""

    modules: tuple[str, ...]  # by name, ``*`` standing for one part
    backend: Backend
    length: int
