"""Context parallelism: every row is cut over the cp ranks, and attention sees the keys of all of them.

Rank i holds chunks i and 2n-1-i of 2n (``models.parameters.SequenceShard``), which balances causal attention.
There are three variants, all exact:

- ``ring`` (Liu et al. 2023): keys and values travel round the ranks while each computes with the part that it
  has. In the backward pass their gradients travel along. A rank holds its own part, the current one and the
  one on its way. The source of the keys decides which scores are needed, half of the square each time:
  the rank itself (causal), an earlier rank (all queries, the first half of the keys) or a later rank (the
  second half of the queries, all keys).
- ``all-gather`` (Dubey et al. 2024): keys and values are gathered first, their gradients reduce-scattered.
  It needs one collective where the ring has n - 1, and memory for whole rows of keys. It is cheap under
  grouped queries.
- ``ulysses`` (``ulysses``): heads instead of tokens are cut during attention.

Keys and values travel with the heads that they have, however many query heads share them, and they and their
gradients in the type of products. Gradients are added up in fp32 or wider where they arrive.

Every rank knows the documents of the whole row (``models.layers.document_mask``), so masks need no exchange.

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
from picotron_ray.parallel.attention.backends import (
    AttentionPlan,
    DocumentCache,
    RowAttention,
)
from picotron_ray.parallel.attention.lse_kernels import LseKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import lse_kernel
from picotron_ray.parallel.attention.sinks import row_kernel, sinks_trained
from picotron_ray.parallel.context.ring_attention import (
    LseMerge,
    RowDocuments,
    TileAttention,
    gathered_tiles,
    ring_tiles,
    visits,
)
from picotron_ray.parallel.context.ulysses import UlyssesAttention
from picotron_ray.parallel.tensor.tensor_parallel import named_modules


class _Ring(torch.autograd.Function):
    """Ring attention: q ``[b, heads, s, d]``, kv ``[2, b, kv_heads, s, d]`` → ``[b, heads, s, d]``.

    The second result is the log-sum-exp ``[b, heads, s]``, without a gradient. Sinks ``[heads]`` enter both,
    once the results over all keys are merged; their gradient is `sinks_trained`'s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        kernel: LseKernel,
        group: dist.ProcessGroup,
        documents: RowDocuments | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ranks, mine = group.size(), group.rank()
        attend, merge, held = TileAttention(kernel, mine, documents), LseMerge(q), kv
        for step, theirs in enumerate(visits(mine, ranks)):
            coming = Shift(held, group) if step < ranks - 1 else None
            attend.forward(merge, q, held, ring_tiles(mine, theirs, ranks, q.size(-2), window), theirs)
            if coming is not None:
                held = coming.wait()
        out, lse = merge.finish(q.dtype, sinks)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.attend, ctx.group, ctx.window = attend, group, window
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        group, ranks, mine = ctx.group, ctx.group.size(), ctx.group.rank()
        saved, held = (gradients[0], q, out, lse), kv
        dq = torch.zeros_like(q, dtype=lse.dtype)
        total = None  # gradient of the current keys, summed over the ranks that they have visited
        for step, theirs in enumerate(visits(mine, ranks)):
            coming = Shift(held, group) if step < ranks - 1 else None
            carried = Shift(total, group, tag=1) if total is not None else None
            tiles = ring_tiles(mine, theirs, ranks, q.size(-2), ctx.window)
            dkv = torch.zeros_like(held, dtype=lse.dtype)
            ctx.attend.backward(tiles, saved, held, dq, dkv, theirs)
            total = (dkv if carried is None else dkv.add_(carried.wait())).to(kv.dtype)
            if coming is not None:
                held = coming.wait()
        assert total is not None
        return dq.to(q.dtype), Shift(total, group, tag=1).wait(), *(None for _ in range(5))


class _Gathered(torch.autograd.Function):
    """All-gather attention, with shapes as of `_Ring`.

    ``order``: the place of each position in the gathered keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        kernel: LseKernel,
        group: dist.ProcessGroup,
        documents: RowDocuments | None,
        window: int | None,
        sinks: Tensor | None,
        order: Tensor,
    ) -> tuple[Tensor, Tensor]:
        attend, merge = TileAttention(kernel, group.rank(), documents), LseMerge(q)
        tiles = gathered_tiles(group.rank(), group.size(), q.size(-2), window)
        attend.forward(merge, q, _whole(kv, group, order), tiles)
        out, lse = merge.finish(q.dtype, sinks)
        ctx.save_for_backward(q, kv, out, lse, order)
        ctx.attend, ctx.group, ctx.tiles = attend, group, tiles
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, order = ctx.saved_tensors
        whole = _whole(kv, ctx.group, order)  # gathered again rather than kept
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(whole, dtype=lse.dtype)
        ctx.attend.backward(ctx.tiles, (gradients[0], q, out, lse), whole, dq, dkv)
        by_rank = torch.empty_like(whole)
        by_rank[..., order, :] = dkv.to(kv.dtype)
        mine = reduce_scatter_sequence(_flat(by_rank), ctx.group)
        return dq.to(q.dtype), _unflat(mine, kv), *(None for _ in range(6))


def _flat(kv: Tensor) -> Tensor:
    """``[2, b, heads, s, d]`` → ``[2 b heads, s, d]``."""
    return kv.flatten(0, 2)


def _unflat(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, like.shape[:3])


def _whole(kv: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """Keys and values of whole rows, in the order of their positions."""
    return _unflat(gather_sequence(_flat(kv), group), kv)[..., order, :]


class ContextAttention:
    """Attention kernel for the model: a rank's queries over the keys of all cp ranks, causal.

    Args:
        length: tokens of a whole row.
        softcap: bound of scores; None: there is none.
        compiled: whether torch.compile traces the caller. Rows with documents are left to Python then: each
            number of them would be compiled for anew.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        variant: ContextVariant,
        length: int,
        backend: Backend,
        softcap: float | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._group, self._variant, self._backend, self._softcap = group, variant, backend, softcap
        ranks = range(group.size())
        self._positions = torch.tensor([SequenceShard(length, len(ranks), i).positions() for i in ranks])
        self._order = self._positions.flatten().argsort()
        self._documents = DocumentCache(self._of_row)
        self._kernel: LseKernel | None = None
        self._attend_documents = torch.compiler.disable(self._attend) if compiled else self._attend

    def _of_row(self, documents: Tensor) -> RowDocuments:
        assert self._kernel is not None
        return RowDocuments(documents, self._positions, self._kernel.counts_documents)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attend = self._attend if documents is None else self._attend_documents
        return attend(q, k, v, documents, window, sinks)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if self._kernel is None:
            self._kernel = lse_kernel(self._backend, q.device, self._softcap)
            self._order, self._positions = self._order.to(q.device), self._positions.to(q.device)
        numbers = None if documents is None else self._documents(documents)
        with torch.autocast(q.device.type, enabled=False):  # wide results stay wide
            held = None if sinks is None else sinks.detach()
            common = (q, torch.stack((k, v)), self._kernel, self._group, numbers, window, held)
            if self._variant == "ring":
                out, lse = _Ring.apply(*common)
            else:
                out, lse = _Gathered.apply(*common, self._order)
            return out if sinks is None else sinks_trained(out, lse, sinks)


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    plan: AttentionPlan,
    variant: ContextVariant,
    *,
    compiled: bool = False,
) -> int:
    """Make the attention modules of ``model`` work on this rank's tokens; returns their number.

    Args:
        compiled: whether torch.compile traces the modules.

    Raises:
        LayoutError: the model names none, a row does not divide, or a kernel is not there.
    """
    if not plan.modules:
        raise LayoutError("layout.cp: this model does not say which of its modules are attention; use cp=1")
    if plan.length % (2 * group.size()):
        raise LayoutError(f"layout.cp: saw rows of {plan.length} tokens for 2 x {group.size()} chunks")
    kernel: RowAttention
    if variant == "ulysses":
        kernel = UlyssesAttention(group, row_kernel(plan, compiled=compiled))
    else:
        kernel = ContextAttention(group, variant, plan.length, plan.backend, plan.softcap, compiled=compiled)
    shard = SequenceShard(plan.length, group.size(), group.rank())
    found = named_modules(model, plan.modules)
    for module in found:
        module.kernel, module.shard = kernel, shard
    return len(found)
