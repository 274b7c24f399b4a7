"""Attention with sinks (`models.layers.sinks`) by kernels that know none but give their log-sum-exp.

Results are corrected once they are those of all keys of a query. What is kept for backward is the corrected
output and log-sum-exp. From these two a kernel's backward pass recomputes the weights as they are with sinks,
so its gradients of q, k and v are exact. That of a sink is that of one more key whose value is zero: minus
its weight times ``sum(gradient * out)``, over the queries of its head.

It is a node of its own, so that a schedule that splits the backward pass runs this sum, and not the kernel,
with the gradients of weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from picotron_ray.config.support.kernels import Backend
from picotron_ray.models.layers.document_mask import numbered_through
from picotron_ray.models.layers.sinks import with_sinks
from picotron_ray.parallel.attention.backends import (
    AttentionPlan,
    DocumentCache,
    RowAttention,
    attention_kernel,
)
from picotron_ray.parallel.attention.by_type import by_type
from picotron_ray.parallel.attention.lse_kernels import KeyMask, LseKernel
from picotron_ray.parallel.attention.lse_kernels_cuda import lse_kernel
from picotron_ray.parallel.attention.tile_documents import TileDocuments


class _OfSinks(torch.autograd.Function):
    """``out`` as it is; backward gives the sinks their gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        ctx.save_for_backward(out, lse, sinks)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor]:
        out, lse, sinks = ctx.saved_tensors
        (gradient,) = gradients
        given = (gradient.to(lse.dtype) * out).sum(dim=-1)
        weight = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
        return gradient, None, -(weight * given).sum(dim=(0, 2)).to(sinks.dtype)


def sinks_trained(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``out [batch, heads, queries, head]``, through which ``sinks [heads]`` get their gradient.

    Args:
        out, lse: of `with_sinks`; ``lse [batch, heads, queries]`` has no gradient.
    """
    found: Tensor = _OfSinks.apply(out, lse, sinks)
    return found


class _SunkRows(torch.autograd.Function):
    """Attention over whole rows: q, k, v, sinks → out, log-sum-exp; the sinks' gradient is not its own."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: LseKernel, seen: KeyMask
    ) -> tuple[Tensor, Tensor]:
        out, lse = with_sinks(*kernel.forward(q, k, v, seen), sinks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.seen = kernel, seen
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found = ctx.kernel.backward(gradients[0].contiguous(), q, k, v, out, lse, ctx.seen)
        return (*found, None, None, None)


def sunk_kernel(backend: Backend, *, compiled: bool = False) -> RowAttention:
    """Kernel over whole rows as `backends.attention_kernel`, that takes sinks ``[heads]`` after the window.

    Args:
        compiled: whether torch.compile traces the caller. Rows with documents are left to Python then.
    """
    kernels: dict[torch.device, LseKernel] = {}

    def made(documents: Tensor, counted: bool) -> TileDocuments:
        row = numbered_through(documents)
        return TileDocuments(row, row, int(row[-1, -1]) + 1 if counted else None)

    cache = DocumentCache(made)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor
    ) -> Tensor:
        if q.device not in kernels:
            kernels[q.device] = lse_kernel(backend, q.device)
        kernel = kernels[q.device]
        numbers = None if documents is None else cache(documents, kernel.counts_documents)
        seen = KeyMask(True, None if window is None else window - 1, numbers)
        with torch.autocast(q.device.type, enabled=False):  # wide results stay wide
            out, lse = _SunkRows.apply(q.to(v.dtype), k.to(v.dtype), v, sinks.detach(), kernel, seen)
            return sinks_trained(out, lse, sinks)

    of_documents = torch.compiler.disable(attend) if compiled else attend

    def of_rows(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor
    ) -> Tensor:
        return (attend if documents is None else of_documents)(q, k, v, documents, window, sinks)

    return of_rows


def row_kernel(plan: AttentionPlan, *, compiled: bool = False) -> RowAttention:
    """Kernel over whole rows of a plan, with sinks or without; parts in fp32 have their own where it says so.

    Args:
        compiled: whether torch.compile traces the caller.

    Raises:
        LayoutError: a kernel is not there, or caps no scores.
    """

    def made(backend: Backend, compiled: bool) -> RowAttention:
        if plan.sinks:
            return sunk_kernel(backend, compiled=compiled)
        return attention_kernel(backend, compiled=compiled, softcap=plan.softcap)

    kernel = made(plan.backend, compiled)
    return kernel if plan.full is None else by_type(kernel, made(plan.full, False))
