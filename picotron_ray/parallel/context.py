"""Context parallelism: every row is cut over the cp ranks, and attention sees the keys of all of them.

Rank i holds chunks i and 2n-1-i of 2n (``models.plan.SequenceShard``), which evens out causal attention. Two
variants, both exact:

- ``ring`` (Liu et al. 2023): keys and values travel round the ranks while each computes with the part it
  has; in the backward pass their gradients travel along. A rank never holds more than two parts. Which
  scores are needed follows from where the keys come from: the rank itself (causal), an earlier rank (all
  queries, the first half of the keys) or a later one (the second half of the queries, all keys): half of the
  square, each time.
- ``all-gather`` (Dubey et al. 2024): keys and values are gathered first, their gradients reduce-scattered.
  One collective where the ring has n - 1, for the memory of whole rows of keys; cheap under grouped queries.

Partial results are merged by their log-sum-exp, in fp32 or wider. Keys that several query heads share are
expanded only for the kernel, never on the wire.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.comm.sequence import Shift, gather_sequence, reduce_scatter_sequence
from picotron_ray.config.kernels import Backend
from picotron_ray.config.layout import Context
from picotron_ray.errors import LayoutError
from picotron_ray.models.plan import SequenceShard
from picotron_ray.parallel.attention import AttentionPlan, LseKernel, lse_kernel
from picotron_ray.parallel.tensor import named_modules

ALL = slice(None)


class Part(NamedTuple):
    """One call of a kernel: which local queries see which of the keys at hand, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


def ring_part(mine: int, theirs: int, length: int) -> Part:
    """What rank ``mine`` computes with the keys of rank ``theirs``; both hold ``length`` tokens."""
    half = length // 2
    if mine == theirs:
        return Part(ALL, ALL, True)
    return Part(ALL, slice(0, half), False) if theirs < mine else Part(slice(half, None), ALL, False)


def gathered_parts(mine: int, ranks: int, length: int) -> list[Part]:
    """What rank ``mine`` computes with the keys of whole rows: per chunk what is before it, and itself."""
    half, parts = length // 2, []
    for queries, chunk in ((slice(0, half), mine), (slice(half, None), 2 * ranks - 1 - mine)):
        start = chunk * half
        if start:
            parts.append(Part(queries, slice(0, start), False))
        parts.append(Part(queries, slice(start, start + half), True))
    return parts


class _Merge:
    """Running attention of local queries over more and more of the keys."""

    def __init__(self, q: Tensor) -> None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = torch.zeros_like(q, dtype=wide)
        self.lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Take in the result over keys not seen yet."""
        before, seen = self.lse[..., queries], self.out[..., queries, :]
        total = torch.logaddexp(before, lse)
        seen.mul_((before - total).exp().unsqueeze(-1)).add_(out * (lse - total).exp().unsqueeze(-1))
        before.copy_(total)


class _Attend:
    """Calls of one kernel on parts of the local queries and of keys: ``kv [2, batch, kv_heads, s, head]``."""

    def __init__(self, kernel: LseKernel, heads: int, kv_heads: int) -> None:
        self._kernel, self._copies = kernel, heads // kv_heads

    def _expand(self, x: Tensor) -> Tensor:
        return x if self._copies == 1 else x.repeat_interleave(self._copies, dim=1)

    def _shared(self, gradient: Tensor) -> Tensor:
        """Gradients of query heads that share a key, summed."""
        return gradient if self._copies == 1 else gradient.unflatten(1, (-1, self._copies)).sum(dim=2)

    def forward(self, merge: _Merge, q: Tensor, kv: Tensor, part: Part) -> None:
        k, v = self._expand(kv[0][..., part.keys, :]), self._expand(kv[1][..., part.keys, :])
        merge.add(part.queries, *self._kernel.forward(q[..., part.queries, :], k, v, part.causal))

    def backward(self, part: Part, saved: tuple[Tensor, ...], kv: Tensor, dq: Tensor, dkv: Tensor) -> None:
        """Add to ``dq`` and ``dkv`` what one part contributes; ``saved``: (gradient, q, out, lse)."""
        grad, q, out = (x[..., part.queries, :].contiguous() for x in saved[:3])
        lse = saved[3][..., part.queries].contiguous()
        k, v = self._expand(kv[0][..., part.keys, :]), self._expand(kv[1][..., part.keys, :])
        found_q, found_k, found_v = self._kernel.backward(grad, q, k, v, out, lse, part.causal)
        dq[..., part.queries, :] += found_q
        dkv[0][..., part.keys, :] += self._shared(found_k)
        dkv[1][..., part.keys, :] += self._shared(found_v)


class _Ring(torch.autograd.Function):
    """q ``[b, heads, s, d]``, kv ``[2, b, kv_heads, s, d]`` → attention ``[b, heads, s, d]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, kernel: LseKernel, group: dist.ProcessGroup) -> Tensor:
        ranks, mine = group.size(), group.rank()
        attend, merge, held = _Attend(kernel, q.size(1), kv.size(2)), _Merge(q), kv
        for step in range(ranks):
            coming = Shift(held, group) if step < ranks - 1 else None
            attend.forward(merge, q, held, ring_part(mine, (mine - step) % ranks, q.size(-2)))
            if coming is not None:
                held = coming.wait()
        out = merge.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merge.lse)
        ctx.attend, ctx.group = attend, group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        group, ranks, mine = ctx.group, ctx.group.size(), ctx.group.rank()
        saved, held = (gradients[0], q, out, lse), kv
        dq = torch.zeros_like(q, dtype=lse.dtype)
        total = None  # the gradient of the keys at hand, by the ranks that they have visited
        for step in range(ranks):
            coming = Shift(held, group) if step < ranks - 1 else None
            carried = Shift(total, group, tag=1) if total is not None else None
            part = ring_part(mine, (mine - step) % ranks, q.size(-2))
            dkv = torch.zeros_like(held, dtype=lse.dtype)
            ctx.attend.backward(part, saved, held, dq, dkv)
            total = dkv if carried is None else dkv.add_(carried.wait())
            if coming is not None:
                held = coming.wait()
        assert total is not None
        return dq.to(q.dtype), Shift(total, group, tag=1).wait().to(kv.dtype), None, None


class _Gathered(torch.autograd.Function):
    """As `_Ring`, all keys gathered first; ``order``: where each position lies among what is gathered."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, kernel: LseKernel, group: dist.ProcessGroup, order: Tensor
    ) -> Tensor:
        attend, merge = _Attend(kernel, q.size(1), kv.size(2)), _Merge(q)
        whole = _whole(kv, group, order)
        for part in gathered_parts(group.rank(), group.size(), q.size(-2)):
            attend.forward(merge, q, whole, part)
        out = merge.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merge.lse, order)
        ctx.attend, ctx.group = attend, group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, kv, out, lse, order = ctx.saved_tensors
        whole = _whole(kv, ctx.group, order)  # gathered again rather than kept
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(whole, dtype=lse.dtype)
        for part in gathered_parts(ctx.group.rank(), ctx.group.size(), q.size(-2)):
            ctx.attend.backward(part, (gradients[0], q, out, lse), whole, dq, dkv)
        by_rank = torch.empty_like(dkv)
        by_rank[..., order, :] = dkv
        mine = reduce_scatter_sequence(_flat(by_rank), ctx.group)
        return dq.to(q.dtype), _unflat(mine, kv).to(kv.dtype), None, None, None


def _flat(kv: Tensor) -> Tensor:
    """``[2, b, heads, s, d]`` → ``[2 b heads, s, d]``."""
    return kv.flatten(0, 2)


def _unflat(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, like.shape[:3])


def _whole(kv: Tensor, group: dist.ProcessGroup, order: Tensor) -> Tensor:
    """Keys and values of whole rows, in the order of their positions."""
    return _unflat(gather_sequence(_flat(kv), group), kv)[..., order, :]


class ContextAttention:
    """Causal attention of a rank's queries over the keys of all cp ranks: a kernel for the model."""

    def __init__(self, group: dist.ProcessGroup, variant: Context, length: int, backend: Backend) -> None:
        self._group, self._variant, self._backend = group, variant, backend
        ranks = group.size()
        gathered = [at for index in range(ranks) for at in SequenceShard(length, ranks, index).positions()]
        self._order = torch.tensor(gathered).argsort()
        self._kernel: LseKernel | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._kernel is None:
            self._kernel, self._order = lse_kernel(self._backend, q.device), self._order.to(q.device)
        kv = torch.stack((k, v))
        with torch.autocast(q.device.type, enabled=False):  # what is kept wide stays wide
            if self._variant == "ring":
                return _Ring.apply(q, kv, self._kernel, self._group)
            return _Gathered.apply(q, kv, self._kernel, self._group, self._order)


def apply_context_parallel(
    model: nn.Module, group: dist.ProcessGroup, plan: AttentionPlan, variant: Context
) -> int:
    """Let the attention modules of ``model`` work on this rank's tokens; returns how many there are.

    Raises LayoutError where the model names none, or a row does not divide.
    """
    if not plan.modules:
        raise LayoutError("layout.cp: this model does not say which of its modules are attention; use cp=1")
    if plan.length % (2 * group.size()):
        raise LayoutError(f"layout.cp: saw rows of {plan.length} tokens for 2 x {group.size()} chunks")
    kernel = ContextAttention(group, variant, plan.length, plan.backend)
    shard = SequenceShard(plan.length, group.size(), group.rank())
    found = named_modules(model, plan.modules)
    for module in found:
        module.kernel, module.shard = kernel, shard
    return len(found)
