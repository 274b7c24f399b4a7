"""Ring and all-gather attention over three ranks that are computed one after the other, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from picotron_ray.models.layers.document_mask import document_numbers
from picotron_ray.parallel.attention.lse_kernels import LseKernel, MathKernel
from picotron_ray.parallel.context.ring_attention import (
    ALL,
    AttentionTile,
    DocumentNumbers,
    LseMerge,
    TileAttention,
    gathered_tiles,
    ring_tile,
)


def parts_of(ranks: int, tokens: int, variant: str) -> Iterator[tuple[int, AttentionTile, int | None]]:
    """What each rank computes: its number, the part, and whose keys are at hand (None: all)."""
    for mine in range(ranks):
        if variant == "ring":
            for theirs in range(ranks):
                yield mine, ring_tile(mine, theirs, tokens), theirs
        else:
            for part in gathered_tiles(mine, ranks, tokens):
                yield mine, part, None


def merged(
    kernel: LseKernel, variant: str, masked: bool, dtype: torch.dtype, device: torch.device, row: int = 48
) -> list[float]:
    """All that three ranks compute of a row with a kernel, one after the other, with shared keys.

    Returns: how far the output and the gradients of queries and of keys and values are from the formulas over
    whole rows in fp64, relative to their norms.
    """
    ranks, heads, kv_heads, head = 3, 4, 2, 16
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, heads, row, head), (2, 2, kv_heads, row, head), (2, heads, row, head))
    q, kv, grad = (torch.randn(size, generator=generator).to(dtype).to(device) for size in sizes)
    tokens = torch.randint(0, 8, (2, row), generator=generator).to(device)
    documents = document_numbers(tokens, 0) if masked else None
    half = row // (2 * ranks)
    chunks = torch.arange(row, device=device).split(half)
    at = [torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank])) for rank in range(ranks)]

    def numbers(mine: int, theirs: int | None) -> DocumentNumbers:
        if documents is None:
            return DocumentNumbers()
        return DocumentNumbers(
            documents[:, at[mine]], documents if theirs is None else documents[:, at[theirs]]
        )

    attend = TileAttention(kernel, heads, kv_heads)
    merges = [LseMerge(q[..., at[rank], :]) for rank in range(ranks)]
    for mine, part, theirs in parts_of(ranks, 2 * half, variant):
        keys = kv if theirs is None else kv[..., at[theirs], :]
        attend.forward(merges[mine], q[..., at[mine], :], keys, part, numbers(mine, theirs))
    wide = merges[0].out.dtype
    out, dq, dkv = (torch.zeros_like(x, dtype=wide) for x in (q, q, kv))
    for rank, merge in enumerate(merges):
        out[..., at[rank], :] = merge.out
    for mine, part, theirs in parts_of(ranks, 2 * half, variant):
        own = at[mine]
        saved = grad[..., own, :], q[..., own, :], merges[mine].out.to(dtype), merges[mine].lse
        where = torch.arange(row, device=device) if theirs is None else at[theirs]
        mine_dq, mine_dkv = dq[..., own, :], dkv[..., where, :]
        attend.backward(part, numbers(mine, theirs), saved, kv[..., where, :], mine_dq, mine_dkv)
        dq[..., own, :], dkv[..., where, :] = mine_dq, mine_dkv
    whole = whole_row(q, kv, grad, documents)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip((out, dq, dkv), whole, strict=True)]


def whole_row(q: Tensor, kv: Tensor, grad: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients by the formulas, in fp64."""
    q, kv, grad = q.double(), kv.double(), grad.double()
    merge, kernel = LseMerge(q), TileAttention(MathKernel(), q.size(1), kv.size(2))
    part, numbers = AttentionTile(ALL, ALL, True), DocumentNumbers(documents, documents)
    kernel.forward(merge, q, kv, part, numbers)
    dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
    kernel.backward(part, numbers, (grad, q, merge.out, merge.lse), kv, dq, dkv)
    return merge.out, dq, dkv
