"""Grouped-query self-attention (Ainslie et al. 2023), of all heads or of those of a tensor-parallel rank.

Head counts are read off the local projections (views with ``-1``), so tensor parallelism may cut the weights
by whole heads. The kernel is a field, and attention knows which positions its tokens have. Documents of a row
are an argument of every forward, not a state of modules: micro-batches overlap in pipelines, and
recomputation runs a forward again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.layers.document_mask import seen_in_row
from picotron_ray.models.layers.fused_linear import FusedLinear
from picotron_ray.models.layers.rope import Rope, rotate
from picotron_ray.models.layers.softcap import capped_attention
from picotron_ray.models.parameters import SequenceShard

AttentionKernel = Callable[..., Tensor]
"""See :func:`sdpa`; of `SinkAttention` one that takes sinks ``[heads]`` after the window."""


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Causal attention by torch's scaled_dot_product_attention.

    Args:
        q: ``[batch, heads, seq, head]``; k, v ``[batch, kv_heads, seq, head]``.
        documents: numbers of the whole row's documents ``[batch, row]`` (`models.layers.document_mask`),
            across which nothing is seen; None: the row is one.
        window: a query sees the last ``window`` keys alone, its own included (Jiang et al. 2023); None: all.

    Returns: ``[batch, heads, seq, head]``.
    """
    seen = None
    if documents is not None:
        seen = seen_in_row(q.size(-2), documents, window, q.device)
    elif window is not None:
        seen = _window_mask(q.size(-2), window, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=k.size(1) != q.size(1)
    )


@lru_cache(maxsize=4)
def _window_mask(row: int, window: int, device: torch.device) -> Tensor:
    """One for all layers and steps, also where evaluation asks first."""
    with torch.inference_mode(False):
        return seen_in_row(row, None, window, device)


def softcapped(cap: float) -> AttentionKernel:
    """Make attention as :func:`sdpa`, whose scores are capped (`models.layers.softcap`)."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        return capped_attention(q, k, v, seen_in_row(q.size(-2), documents, window, q.device), cap)

    return attend


def query_times(config: ModelConfig) -> float:
    """Return what turns the kernel's 1 / sqrt(head) into 1 / sqrt(``model.query_pre_attn_scalar``)."""
    scalar = config.query_pre_attn_scalar
    return 1.0 if scalar is None or scalar == config.head_size else math.sqrt(config.head_size / scalar)


class Attention(nn.Module):
    """Grouped-query self-attention.

    Args:
        kernel: attention over the local queries, see :func:`sdpa`.
        rope: rotary positions; None: nothing turns.
        biased, out_biased: whether the q, k and v projections, and that of the output, have biases.
        q_norm, k_norm: norms of each head of q and k, before they are turned; None: there is none.
        whole: whether a token sees all tokens before it, whatever ``sliding_window`` of the config says.
        query_times: what queries are multiplied by, besides the kernel's 1 / sqrt(head).

    Fields:
        kernel: as above; parallelism replaces it.
        shard: which tokens of the row are here; None: all of them.
        fused_linear: computes the projections together; None: each computes itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernel: AttentionKernel,
        *,
        rope: Rope | None = None,
        biased: bool = False,
        out_biased: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        whole: bool = False,
        query_times: float = 1.0,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_size = config.head_size
        self.rope = rope
        self.window = None if whole else config.sliding_window
        self.query_times = query_times
        self.kernel = kernel
        self.shard: SequenceShard | None = None
        self.fused_linear: FusedLinear | None = None
        self.wq = nn.Linear(hidden, config.query_width, bias=biased)
        self.wk = nn.Linear(hidden, config.key_width, bias=biased)
        self.wv = nn.Linear(hidden, config.key_width, bias=biased)
        self.wo = nn.Linear(config.query_width, hidden, bias=out_biased)
        self.q_norm, self.k_norm = q_norm, k_norm

    def split(self, x: Tensor) -> Tensor:
        """``[batch, seq, local heads x head]`` → ``[batch, seq, local heads, head]``."""
        return x.view(x.size(0), x.size(1), -1, self.head_size)

    def normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """``[batch, seq, local heads x head]`` of q or k → ``[batch, seq, local heads, head]``, normed."""
        heads = self.split(x)
        return heads if norm is None else norm(heads)

    def fuse(self, as_one: bool = True) -> None:
        """Let `fused_linear` compute the projections, as one product or one by one."""
        self.fused_linear = FusedLinear(self.wq, self.wk, self.wv, as_one=as_one)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (self.wq(x), self.wk(x), self.wv(x)) if self.fused_linear is None else self.fused_linear(x)
        v = self.split(v).transpose(1, 2)
        # norms are in a wider type than products under autocast, and kernels take one type, that of products
        q = rotate(self.normed(q, self.q_norm).transpose(1, 2), self.rope, self.shard).to(v.dtype)
        k = rotate(self.normed(k, self.k_norm).transpose(1, 2), self.rope, self.shard).to(v.dtype)
        if self.query_times != 1.0:
            q = q * self.query_times
        row = q.size(2) if self.shard is None else self.shard.length
        window = self.window if self.window is not None and self.window < row else None
        out = self.attend(q, k, v, documents, window)
        return self.wo(out.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
        """Call the kernel; arguments as of :func:`sdpa`."""
        return self.kernel(q, k, v, documents, window)


class SinkAttention(Attention):
    """Grouped-query self-attention with one sink a head (`models.layers.sinks`); arguments as its base's.

    Fields:
        sinks: ``[heads]`` logits.
    """

    def __init__(self, config: ModelConfig, kernel: AttentionKernel, **options: Any) -> None:
        super().__init__(config, kernel, **options)
        self.sinks = nn.Parameter(torch.empty(config.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
        return self.kernel(q, k, v, documents, window, self.sinks)
