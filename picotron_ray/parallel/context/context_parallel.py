"""Context parallelism: every row is cut over the cp ranks, and attention sees the keys of all of them.

Rank i holds chunks i and 2n-1-i of 2n (``models.parameters.SequenceShard``), which balances causal attention.
There are two variants, both exact:

- ``ring`` (Liu et al. 2023): keys and values travel round the ranks while each computes with the part that it
  has. In the backward pass their gradients travel along. A rank holds its own part, the current one and the
  one on its way. The source of the keys decides which scores are needed, half of the square each time:
  the rank itself (causal), an earlier rank (all queries, the first half of the keys) or a later rank (the
  second half of the queries, all keys).
- ``all-gather`` (Dubey et al. 2024): keys and values are gathered first, their gradients reduce-scattered.
  It needs one collective where the ring has n - 1, and memory for whole rows of keys. It is cheap under
  grouped queries.

Every rank knows the documents of the whole row (``models.layers.document_mask``), so masks need no exchange.
Each is made when it is used, of the document numbers of its queries and keys.

``ring_attention`` has the tiles and the merging of their results.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.comm.sequence_collectives import Shift, gather_sequence, reduce_scatter_sequence
from picotron_ray.config.support.kernels import Backend
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import ContextVariant
from picotron_ray.models.parameters import SequenceShard
from picotron_ray.parallel.attention.backends import AttentionPlan
from picotron_ray.parallel.attention.lse_kernels import LseKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import lse_kernel
from picotron_ray.parallel.context.ring_attention import (
    DocumentNumbers,
    LseMerge,
    TileAttention,
    gathered_tiles,
    ring_tile,
)
from picotron_ray.parallel.tensor.tensor_parallel import named_modules


class _Ring(torch.autograd.Function):
    """Ring attention: q ``[b, heads, s, d]``, kv ``[2, b, kv_heads, s, d]`` → ``[b, heads, s, d]``.

    ``documents [ranks, b, s]``: numbers of the tokens of each rank, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        kernel: LseKernel,
        group: dist.ProcessGroup,
        documents: Tensor | None,
    ) -> Tensor:
        ranks, mine = group.size(), group.rank()
        attend, merge, held = TileAttention(kernel, q.size(1), kv.size(2)), LseMerge(q), kv
        for step in range(ranks):
            coming = Shift(held, group) if step < ranks - 1 else None
            theirs = (mine - step) % ranks
            tile, numbers = ring_tile(mine, theirs, q.size(-2)), _numbers(documents, mine, theirs)
            attend.forward(merge, q, held, tile, numbers)
            if coming is not None:
                held = coming.wait()
        out = merge.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merge.lse, documents)
        ctx.attend, ctx.group = attend, group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, kv, out, lse, documents = ctx.saved_tensors
        group, ranks, mine = ctx.group, ctx.group.size(), ctx.group.rank()
        saved, held = (gradients[0], q, out, lse), kv
        dq = torch.zeros_like(q, dtype=lse.dtype)
        total = None  # gradient of the current keys, summed over the ranks that they have visited
        for step in range(ranks):
            coming = Shift(held, group) if step < ranks - 1 else None
            carried = Shift(total, group, tag=1) if total is not None else None
            theirs = (mine - step) % ranks
            tile, numbers = ring_tile(mine, theirs, q.size(-2)), _numbers(documents, mine, theirs)
            dkv = torch.zeros_like(held, dtype=lse.dtype)
            ctx.attend.backward(tile, numbers, saved, held, dq, dkv)
            total = dkv if carried is None else dkv.add_(carried.wait())
            if coming is not None:
                held = coming.wait()
        assert total is not None
        return dq.to(q.dtype), Shift(total, group, tag=1).wait().to(kv.dtype), None, None, None


class _Gathered(torch.autograd.Function):
    """All-gather attention, with shapes as of `_Ring`.

    ``order``: the place of each position in the gathered keys; ``numbers``: with the whole row as keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        kernel: LseKernel,
        group: dist.ProcessGroup,
        order: Tensor,
        numbers: DocumentNumbers,
    ) -> Tensor:
        attend, merge = TileAttention(kernel, q.size(1), kv.size(2)), LseMerge(q)
        whole = _whole(kv, group, order)
        for tile in gathered_tiles(group.rank(), group.size(), q.size(-2)):
            attend.forward(merge, q, whole, tile, numbers)
        out = merge.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merge.lse, order, *numbers)
        ctx.attend, ctx.group = attend, group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        q, kv, out, lse, order, *numbers = ctx.saved_tensors
        whole = _whole(kv, ctx.group, order)  # gathered again rather than kept
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(whole, dtype=lse.dtype)
        saved = (gradients[0], q, out, lse)
        for tile in gathered_tiles(ctx.group.rank(), ctx.group.size(), q.size(-2)):
            ctx.attend.backward(tile, DocumentNumbers(*numbers), saved, whole, dq, dkv)
        by_rank = torch.empty_like(dkv)
        by_rank[..., order, :] = dkv
        mine = reduce_scatter_sequence(_flat(by_rank), ctx.group)
        return dq.to(q.dtype), _unflat(mine, kv).to(kv.dtype), None, None, None, None


def _numbers(documents: Tensor | None, mine: int, theirs: int) -> DocumentNumbers:
    """Document numbers of one rank's queries and another's keys."""
    return DocumentNumbers() if documents is None else DocumentNumbers(documents[mine], documents[theirs])


def _flat(kv: Tensor) -> Tensor:
    """``[2, b, heads, s, d]`` → ``[2 b heads, s, d]``."""
    return kv.flatten(0, 2)


def _unflat(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, like.shape[:3])


def _whole(kv: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """Keys and values of whole rows, in the order of their positions."""
    return _unflat(gather_sequence(_flat(kv), group), kv)[..., order, :]


class ContextAttention:
    """Attention kernel for the model: a rank's queries over the keys of all cp ranks, causal."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        variant: ContextVariant,
        length: int,
        backend: Backend,
        softcap: float | None = None,
    ) -> None:
        self._group, self._variant, self._backend, self._softcap = group, variant, backend, softcap
        ranks = group.size()
        gathered = [at for index in range(ranks) for at in SequenceShard(length, ranks, index).positions()]
        self._gathered = torch.tensor(gathered)  # positions, rank by rank
        self._order = self._gathered.argsort()
        self._kernel: LseKernel | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        if window is not None:
            raise LayoutError(f"layout.cp: saw a window of {window}, which parts of rows do not know; use 1")
        if self._kernel is None:
            self._kernel, self._order = (
                lse_kernel(self._backend, q.device, self._softcap),
                self._order.to(q.device),
            )
            self._gathered = self._gathered.to(q.device)
        kv, by_rank = torch.stack((k, v)), None
        if documents is not None:
            by_rank = documents[:, self._gathered].unflatten(1, (self._group.size(), -1)).transpose(0, 1)
        with torch.autocast(q.device.type, enabled=False):  # wide results stay wide
            if self._variant == "ring":
                return _Ring.apply(q, kv, self._kernel, self._group, by_rank)
            numbers = (
                DocumentNumbers()
                if by_rank is None
                else DocumentNumbers(by_rank[self._group.rank()], documents)
            )
            return _Gathered.apply(q, kv, self._kernel, self._group, self._order, numbers)


def apply_context_parallel(
    model: nn.Module, group: dist.ProcessGroup, plan: AttentionPlan, variant: ContextVariant
) -> int:
    """Make the attention modules of ``model`` work on this rank's tokens; returns their number.

    Raises LayoutError where the model names none, or a row does not divide.
    """
    if not plan.modules:
        raise LayoutError("layout.cp: this model does not say which of its modules are attention; use cp=1")
    if plan.length % (2 * group.size()):
        raise LayoutError(f"layout.cp: saw rows of {plan.length} tokens for 2 x {group.size()} chunks")
    kernel = ContextAttention(group, variant, plan.length, plan.backend, plan.softcap)
    shard = SequenceShard(plan.length, group.size(), group.rank())
    found = named_modules(model, plan.modules)
    for module in found:
        module.kernel, module.shard = kernel, shard
    return len(found)
