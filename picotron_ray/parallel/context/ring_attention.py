"""Attention over parts of the keys: which parts a context-parallel rank computes, and how they are merged.

Partial results are merged by their log-sum-exp, in fp32 or wider. Keys that several query heads share are
expanded only for the kernel, never on the wire.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from picotron_ray.models.layers.document_mask import same_document
from picotron_ray.parallel.attention.lse_kernels import KeyMask, LseKernel

ALL = slice(None)


class AttentionTile(NamedTuple):
    """One call of a kernel: which local queries see which of the keys at hand, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


def ring_tile(mine: int, theirs: int, length: int) -> AttentionTile:
    """What rank ``mine`` computes with the keys of rank ``theirs``; both hold ``length`` tokens."""
    half = length // 2
    if mine == theirs:
        return AttentionTile(ALL, ALL, True)
    return (
        AttentionTile(ALL, slice(0, half), False)
        if theirs < mine
        else AttentionTile(slice(half, None), ALL, False)
    )


def gathered_tiles(mine: int, ranks: int, length: int) -> list[AttentionTile]:
    """What rank ``mine`` computes with the keys of whole rows: per chunk what is before it, and itself."""
    half, parts = length // 2, []
    for queries, chunk in ((slice(0, half), mine), (slice(half, None), 2 * ranks - 1 - mine)):
        start = chunk * half
        if start:
            parts.append(AttentionTile(queries, slice(0, start), False))
        parts.append(AttentionTile(queries, slice(start, start + half), True))
    return parts


class LseMerge:
    """Running attention of local queries over more and more of the keys."""

    def __init__(self, q: Tensor) -> None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = torch.zeros_like(q, dtype=wide)
        self.lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Take in the result over keys not seen yet."""
        before, seen = self.lse[..., queries], self.out[..., queries, :]
        total = torch.logaddexp(before, lse)
        # a query that has seen nothing so far keeps -inf and 0: less 0 rather than -inf, or it were no number
        level = total.masked_fill(total == float("-inf"), 0.0)
        seen.mul_((before - level).exp().unsqueeze(-1)).add_(out * (lse - level).exp().unsqueeze(-1))
        before.copy_(total)


class DocumentNumbers(NamedTuple):
    """Documents of the local queries ``[batch, q]`` and of the keys at hand ``[batch, k]``; None: one."""

    queries: Tensor | None = None
    keys: Tensor | None = None

    def key_mask(self, tile: AttentionTile) -> KeyMask:
        """What the queries of a part see of its keys."""
        if self.queries is None or self.keys is None:
            return KeyMask(tile.causal)
        mask = same_document(self.queries[:, tile.queries], self.keys[:, tile.keys])
        return KeyMask(False, mask.tril() if tile.causal else mask)


class TileAttention:
    """Calls of one kernel on parts of the local queries and of keys: ``kv [2, batch, kv_heads, s, head]``."""

    def __init__(self, kernel: LseKernel, heads: int, kv_heads: int) -> None:
        self._kernel, self._copies = kernel, heads // kv_heads

    def _expand(self, x: Tensor) -> Tensor:
        return x if self._copies == 1 else x.repeat_interleave(self._copies, dim=1)

    def _shared(self, gradient: Tensor) -> Tensor:
        """Gradients of query heads that share a key, summed."""
        return gradient if self._copies == 1 else gradient.unflatten(1, (-1, self._copies)).sum(dim=2)

    def forward(
        self, merge: LseMerge, q: Tensor, kv: Tensor, tile: AttentionTile, numbers: DocumentNumbers
    ) -> None:
        k, v = self._expand(kv[0][..., tile.keys, :]), self._expand(kv[1][..., tile.keys, :])
        merge.add(tile.queries, *self._kernel.forward(q[..., tile.queries, :], k, v, numbers.key_mask(tile)))

    def backward(
        self,
        tile: AttentionTile,
        numbers: DocumentNumbers,
        saved: tuple[Tensor, ...],
        kv: Tensor,
        dq: Tensor,
        dkv: Tensor,
    ) -> None:
        """Add to ``dq`` and ``dkv`` what one part contributes; ``saved``: (gradient, q, out, lse)."""
        grad, q, out = (x[..., tile.queries, :].contiguous() for x in saved[:3])
        lse = saved[3][..., tile.queries].contiguous()
        k, v = self._expand(kv[0][..., tile.keys, :]), self._expand(kv[1][..., tile.keys, :])
        found_q, found_k, found_v = self._kernel.backward(grad, q, k, v, out, lse, numbers.key_mask(tile))
        dq[..., tile.queries, :] += found_q
        dkv[0][..., tile.keys, :] += self._shared(found_k)
        dkv[1][..., tile.keys, :] += self._shared(found_v)
