"""Tiles of attention that a context-parallel rank computes, and the merging of their results.

Partial results are merged by their log-sum-exp, in fp32 or wider. Keys that several query heads share are
expanded for the kernel only, never for transfers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from picotron_ray.models.layers.document_mask import same_document
from picotron_ray.parallel.attention.lse_kernels import KeyMask, LseKernel

ALL = slice(None)


class AttentionTile(NamedTuple):
    """One kernel call: a range of local queries, a range of the current keys, and whether it is causal."""

    queries: slice
    keys: slice
    causal: bool


def ring_tile(mine: int, theirs: int, length: int) -> AttentionTile:
    """Tile of rank ``mine`` with the keys of rank ``theirs``; both hold ``length`` tokens."""
    half = length // 2
    if theirs < mine:
        return AttentionTile(ALL, slice(0, half), False)
    if theirs > mine:
        return AttentionTile(slice(half, None), ALL, False)
    return AttentionTile(ALL, ALL, True)


def gathered_tiles(mine: int, ranks: int, length: int) -> list[AttentionTile]:
    """Tiles of rank ``mine`` with the keys of whole rows: per chunk the keys before it, and its own."""
    half, parts = length // 2, []
    for queries, chunk in ((slice(0, half), mine), (slice(half, None), 2 * ranks - 1 - mine)):
        start = chunk * half
        if start:
            parts.append(AttentionTile(queries, slice(0, start), False))
        parts.append(AttentionTile(queries, slice(start, start + half), True))
    return parts


class LseMerge:
    """Running attention of local queries while keys arrive, merged by log-sum-exp."""

    def __init__(self, q: Tensor) -> None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = torch.zeros_like(q, dtype=wide)
        self.lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the result over further keys."""
        before, seen = self.lse[..., queries], self.out[..., queries, :]
        total = torch.logaddexp(before, lse)
        # a query without a visible key so far keeps -inf and 0; -inf - (-inf) would be NaN, so subtract 0
        level = total.masked_fill(total == float("-inf"), 0.0)
        seen.mul_((before - level).exp().unsqueeze(-1)).add_(out * (lse - level).exp().unsqueeze(-1))
        before.copy_(total)


class DocumentNumbers(NamedTuple):
    """Document numbers of the local queries ``[batch, q]`` and keys ``[batch, k]``; None: one document."""

    queries: Tensor | None = None
    keys: Tensor | None = None

    def key_mask(self, tile: AttentionTile) -> KeyMask:
        """Mask of a tile."""
        if self.queries is None:
            return KeyMask(tile.causal)
        assert self.keys is not None, "both or none"
        mask = same_document(self.queries[:, tile.queries], self.keys[:, tile.keys])
        return KeyMask(False, mask.tril() if tile.causal else mask)


class TileAttention:
    """Calls of one kernel on tiles of queries and of keys ``kv [2, batch, kv_heads, s, head]``."""

    def __init__(self, kernel: LseKernel, heads: int, kv_heads: int) -> None:
        self._kernel, self._copies = kernel, heads // kv_heads

    def _expand(self, x: Tensor) -> Tensor:
        return x if self._copies == 1 else x.repeat_interleave(self._copies, dim=1)

    def _shared(self, gradient: Tensor) -> Tensor:
        """Sum the gradients of query heads that share a key."""
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
        """Add a tile's gradients to ``dq`` and ``dkv``; ``saved``: (gradient, q, out, lse)."""
        grad, q, out = (x[..., tile.queries, :].contiguous() for x in saved[:3])
        lse = saved[3][..., tile.queries].contiguous()
        k, v = self._expand(kv[0][..., tile.keys, :]), self._expand(kv[1][..., tile.keys, :])
        found_q, found_k, found_v = self._kernel.backward(grad, q, k, v, out, lse, numbers.key_mask(tile))
        dq[..., tile.queries, :] += found_q
        dkv[0][..., tile.keys, :] += self._shared(found_k)
        dkv[1][..., tile.keys, :] += self._shared(found_v)
