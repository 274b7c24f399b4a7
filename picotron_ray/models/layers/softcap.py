"""Soft capping of scores and logits, and attention that does it (Gemma Team 2024, Gemma 2, section 2).

No operator behind scaled_dot_product_attention caps its scores, so they are all in memory here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap tanh(x / cap)``, in the type of ``x``: the same near zero, and never beyond ``cap``."""
    return torch.tanh(x / cap) * cap


def capped_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, cap: float) -> Tensor:
    """Attention whose scores are capped before the softmax, which is computed in fp32 or wider.

    Args:
        q: ``[batch, heads, queries, head]``; k, v ``[batch, kv_heads, keys, head]``.
        seen: which keys a query sees, bool ``[batch or 1, 1, queries, keys]``; one at least.

    Returns: ``[batch, heads, queries, head]``.
    """
    if k.size(1) != q.size(1):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = softcap(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)), cap)
    scores = scores.masked_fill(seen.logical_not(), float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=wide).to(v.dtype) @ v
