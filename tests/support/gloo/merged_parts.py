"""Ring and all-gather attention over three ranks that are computed one after the other, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from picotron_ray.models.layers.document_mask import document_numbers, seen_in_row
from picotron_ray.models.parameters import SequenceShard
from picotron_ray.parallel.attention.lse_kernels import LseKernel
from picotron_ray.parallel.context.ring_attention import (
    AttentionTile,
    LseMerge,
    RowDocuments,
    TileAttention,
    gathered_tiles,
    ring_tiles,
)

RANKS = 3


def parts_of(
    tokens: int, variant: str, window: int | None
) -> Iterator[tuple[int, list[AttentionTile], int | None]]:
    """What each rank computes: its number, the tiles, and whose keys are at hand (None: all)."""
    for mine in range(RANKS):
        if variant == "ring":
            for theirs in range(RANKS):
                yield mine, ring_tiles(mine, theirs, RANKS, tokens, window), theirs
        else:
            yield mine, gathered_tiles(mine, RANKS, tokens, window), None


def merged(
    kernel: LseKernel,
    variant: str,
    masked: bool,
    dtype: torch.dtype,
    device: torch.device,
    row: int = 48,
    window: int | None = None,
) -> list[float]:
    """All that three ranks compute of a row with a kernel, one after the other, with shared keys.

    Returns: how far the output and the gradients of queries and of keys and values are from the formulas over
    whole rows in fp64, relative to their norms.
    """
    heads, kv_heads, head = 4, 2, 16
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, heads, row, head), (2, 2, kv_heads, row, head), (2, heads, row, head))
    q, kv, grad = (torch.randn(size, generator=generator).to(dtype).to(device) for size in sizes)
    tokens = torch.randint(0, 8, (2, row), generator=generator).to(device)
    documents = document_numbers(tokens, 0) if masked else None
    at = torch.tensor([SequenceShard(row, RANKS, rank).positions() for rank in range(RANKS)], device=device)
    rows = None if documents is None else RowDocuments(documents, at, kernel.counts_documents)
    attend = [TileAttention(kernel, rank, rows) for rank in range(RANKS)]
    merges = [LseMerge(q[..., at[rank], :]) for rank in range(RANKS)]
    for mine, tiles, theirs in parts_of(row // RANKS, variant, window):
        keys = kv if theirs is None else kv[..., at[theirs], :]
        attend[mine].forward(merges[mine], q[..., at[mine], :], keys, tiles, theirs)
    out, dq, dkv = (torch.zeros_like(x, dtype=merges[0].out.dtype) for x in (q, q, kv))
    for rank, merge in enumerate(merges):
        out[..., at[rank], :] = merge.out
    for mine, tiles, theirs in parts_of(row // RANKS, variant, window):
        own = at[mine]
        saved = grad[..., own, :], q[..., own, :], merges[mine].out.to(dtype), merges[mine].lse
        where = torch.arange(row, device=device) if theirs is None else at[theirs]
        mine_dq, mine_dkv = dq[..., own, :], dkv[..., where, :]
        attend[mine].backward(tiles, saved, kv[..., where, :], mine_dq, mine_dkv, theirs)
        dq[..., own, :], dkv[..., where, :] = mine_dq, mine_dkv
    whole = whole_row(q, kv, grad, documents, window)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip((out, dq, dkv), whole, strict=True)]


def whole_row(
    q: Tensor, kv: Tensor, grad: Tensor, documents: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients by a softmax over all scores of whole rows and by autograd, in fp64."""
    q, kv, grad = (x.detach().double() for x in (q, kv, grad))
    q, kv = q.requires_grad_(), kv.requires_grad_()
    k, v = kv.repeat_interleave(q.size(1) // kv.size(2), dim=2)
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    seen = seen_in_row(q.size(-2), documents, window, q.device)
    out = scores.masked_fill(seen.logical_not(), float("-inf")).softmax(dim=-1) @ v
    dq, dkv = torch.autograd.grad(out, (q, kv), grad)
    return out.detach(), dq, dkv
