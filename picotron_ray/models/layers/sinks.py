"""Attention sinks: one logit a head that takes a share of every softmax and gives nothing (gpt-oss).

Weights of a query are ``exp(s_j) / (exp(sink) + sum_j exp(s_j))``, so that they sum to less than 1 (OpenAI
2025, gpt-oss model card, section 2; Xiao et al. 2023 for the name). A kernel that knows no sinks gives the
same once its results are corrected by their log-sum-exp (`with_sinks`), which is exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from picotron_ray.models.layers.document_mask import seen_in_row


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor
) -> Tensor:
    """Causal attention with sinks by the formula, the softmax in fp32 or wider; all scores are in memory.

    Args:
        q: ``[batch, heads, seq, head]``; k, v ``[batch, kv_heads, seq, head]``.
        documents, window: as of `models.layers.attention.sdpa`.
        sinks: ``[heads]``.

    Returns: ``[batch, heads, seq, head]``.
    """
    if k.size(1) != q.size(1):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) / math.sqrt(q.size(-1))
    seen = seen_in_row(q.size(-2), documents, window, q.device)
    scores = scores.masked_fill(seen.logical_not(), float("-inf"))
    column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Results over all keys of the queries, as they are with sinks.

    Args:
        out: ``[batch, heads, queries, head]``.
        lse: ``[batch, heads, queries]``, -inf where a query sees nothing.
        sinks: ``[heads]``.

    Returns: the same two, with the sinks' share in both. Backward passes that take the whole row's ``out``
    and ``lse`` give the gradients of q, k and v from these as they stand.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total
