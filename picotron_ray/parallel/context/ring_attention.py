"""Tiles of attention that a context-parallel rank computes, and the merging of their results.

Partial results are merged by their log-sum-exp, in fp32 or wider.

Without a window, a tile spans both chunks of a rank where it can: fewer and larger calls. With one, positions
must be next to each other for a kernel to count them, so each tile is of one chunk of queries and one chunk
of keys. What no query of it sees is cut off beforehand, and tiles of which nothing is seen are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from picotron_ray.models.layers.document_mask import numbered_through
from picotron_ray.models.layers.sinks import with_sinks
from picotron_ray.parallel.attention.lse_kernels import KeyMask, LseKernel, wide
from picotron_ray.parallel.attention.tile_documents import TileDocuments

ALL = slice(None)


class AttentionTile(NamedTuple):
    """One kernel call: ranges of local queries and of current keys, and what they see (`KeyMask`)."""

    queries: slice
    keys: slice
    causal: bool
    left: int | None = None


def ring_tiles(mine: int, theirs: int, ranks: int, length: int, window: int | None) -> list[AttentionTile]:
    """Tiles of rank ``mine`` with the keys of rank ``theirs``; both hold ``length`` tokens."""
    half = length // 2
    if window is None:
        return [_ring_tile(mine, theirs, half)]
    chunks = (0, ranks * 2 - 1)
    found = []
    for query_at, last in enumerate(chunks):
        queries = abs(last - mine)
        for key_at, last_key in enumerate(chunks):
            keys = abs(last_key - theirs)
            tile = _chunk_tile(queries * half, keys * half, half, window)
            if tile is not None:
                found.append(_moved(tile, query_at * half - queries * half, key_at * half - keys * half))
    return found


def _ring_tile(mine: int, theirs: int, half: int) -> AttentionTile:
    if theirs < mine:
        return AttentionTile(ALL, slice(0, half), False)
    if theirs > mine:
        return AttentionTile(slice(half, None), ALL, False)
    return AttentionTile(ALL, ALL, True)


def gathered_tiles(mine: int, ranks: int, length: int, window: int | None) -> list[AttentionTile]:
    """Tiles of rank ``mine`` with the keys of whole rows: per chunk the keys before it, and its own."""
    half, parts = length // 2, []
    for at, chunk in enumerate((mine, 2 * ranks - 1 - mine)):
        start = chunk * half
        for keys in (range(start), range(start, start + half)):
            tile = _tile(range(start, start + half), keys, window) if keys else None
            if tile is not None:
                parts.append(_moved(tile, at * half - start, 0))
    return parts


def _chunk_tile(queries: int, keys: int, half: int, window: int) -> AttentionTile | None:
    """Tile of the chunks that start at two positions."""
    if keys > queries:
        return None
    return _tile(range(queries, queries + half), range(keys, keys + half), window)


def _tile(queries: range, keys: range, window: int | None) -> AttentionTile | None:
    """Tile of the positions ``queries`` with the same positions as keys, or with ``keys`` before all of them.

    Positions that see nothing, or that nobody sees, are left out; None: all of them.
    """
    causal, left = queries == keys, None
    if window is not None and not causal:
        if queries[0] - keys[-1] >= window:
            return None
        keys = range(max(keys[0], queries[0] - window + 1), keys.stop)
        queries = range(queries.start, min(queries.stop, keys[-1] + window))
    if window is not None:
        left = window - 1 - (queries[-1] - keys[-1])
        if left >= len(keys) - 1:
            left = None
    return AttentionTile(slice(queries.start, queries.stop), slice(keys.start, keys.stop), causal, left)


def _moved(tile: AttentionTile, queries: int, keys: int) -> AttentionTile:
    """The tile with positions turned into indices."""
    return tile._replace(
        queries=slice(tile.queries.start + queries, tile.queries.stop + queries),
        keys=slice(tile.keys.start + keys, tile.keys.stop + keys),
    )


class LseMerge:
    """Running attention of local queries while keys arrive, merged by log-sum-exp."""

    def __init__(self, q: Tensor) -> None:
        self.out = torch.zeros_like(q, dtype=wide(q))
        self.lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide(q))

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the result over further keys."""
        before, seen = self.lse[..., queries], self.out[..., queries, :]
        total = torch.logaddexp(before, lse)
        # a query without a visible key so far keeps -inf and 0; -inf - (-inf) would be NaN, so subtract 0
        level = total.masked_fill(total == float("-inf"), 0.0)
        seen.mul_((before - level).exp().unsqueeze(-1)).add_(out * (lse - level).exp().unsqueeze(-1))
        before.copy_(total)

    def finish(self, dtype: torch.dtype, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output in ``dtype`` and the log-sum-exp, once all keys were merged; with sinks ``[heads]``."""
        out, lse = (self.out, self.lse) if sinks is None else with_sinks(self.out, self.lse, sinks)
        return out.to(dtype), lse


class RowDocuments:
    """Documents of a micro-batch's rows, for tiles of them; made once for all layers.

    Args:
        documents: numbers ``[batch, row]`` of the whole rows.
        order: positions of the tokens of each rank, ``[ranks, tokens of a rank]``.
        counted: whether a kernel asks how many there are. The host waits for a GPU to say it.
    """

    def __init__(self, documents: Tensor, order: Tensor, counted: bool) -> None:
        self._row = numbered_through(documents)
        self._local = [self._row[:, at] for at in order]
        self._count = int(self._row[-1, -1]) + 1 if counted else None
        self._tiles: dict[tuple[int | None, ...], TileDocuments] = {}

    def of(self, tile: AttentionTile, mine: int, theirs: int | None) -> TileDocuments:
        """Those of a tile of rank ``mine`` with the keys of rank ``theirs``, or of whole rows (None)."""
        queries, keys = tile.queries, tile.keys
        key = (mine, theirs, queries.start, queries.stop, keys.start, keys.stop)
        if key not in self._tiles:
            row = self._row if theirs is None else self._local[theirs]
            found = TileDocuments(self._local[mine][:, queries], row[:, keys], self._count)
            self._tiles[key] = found
        return self._tiles[key]


class TileAttention:
    """Calls of one kernel on the tiles of rank ``mine``, with keys ``kv [2, batch, kv_heads, s, head]``.

    Args:
        documents: of the rows; None: a row is one.
    """

    def __init__(self, kernel: LseKernel, mine: int, documents: RowDocuments | None = None) -> None:
        self._kernel, self._mine, self._documents = kernel, mine, documents

    def _seen(self, tile: AttentionTile, theirs: int | None) -> KeyMask:
        documents = None if self._documents is None else self._documents.of(tile, self._mine, theirs)
        return KeyMask(tile.causal, tile.left, documents)

    def forward(
        self, merge: LseMerge, q: Tensor, kv: Tensor, tiles: list[AttentionTile], theirs: int | None = None
    ) -> None:
        """Merge what the tiles give; ``theirs``: whose keys they are, None: those of whole rows."""
        for tile in tiles:
            k, v = kv[..., tile.keys, :].unbind()
            seen = self._seen(tile, theirs)
            merge.add(tile.queries, *self._kernel.forward(q[..., tile.queries, :], k, v, seen))

    def backward(
        self,
        tiles: list[AttentionTile],
        saved: tuple[Tensor, ...],
        kv: Tensor,
        dq: Tensor,
        dkv: Tensor,
        theirs: int | None = None,
    ) -> None:
        """Add the tiles' gradients to ``dq`` and ``dkv``; ``saved``: (gradient, q, out, lse)."""
        for tile in tiles:
            grad, q, out = (x[..., tile.queries, :].contiguous() for x in saved[:3])
            lse = saved[3][..., tile.queries].contiguous()
            k, v = kv[..., tile.keys, :].unbind()
            found = self._kernel.backward(grad, q, k, v, out, lse, self._seen(tile, theirs))
            dq[..., tile.queries, :] += found[0]
            dkv[0][..., tile.keys, :] += found[1]
            dkv[1][..., tile.keys, :] += found[2]


def visits(mine: int, ranks: int) -> Iterator[int]:
    """Ranks whose keys are at hand, step by step round the ring."""
    return ((mine - step) % ranks for step in range(ranks))
