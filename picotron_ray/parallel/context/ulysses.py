"""Ulysses: context parallelism by an all-to-all of heads (Jacobs et al. 2023, DeepSpeed Ulysses).

Outside attention a rank has some tokens of every row, with all their heads. An all-to-all of queries, keys
and values gives it whole rows of 1/n of the heads. Attention over them is that of one process: any kernel,
window and document. Another all-to-all brings the results back. Backward runs the same two the other way.

So a layer has two messages forward and two backward, of (n - 1)/n of its queries, keys, values and results:
fewer bytes per rank the more ranks there are, where a ring sends all keys past every rank. Each head lives on
one rank, so n divides the key heads of a tensor-parallel rank (``config.validation.layout``). Key heads fewer
than ranks would have to be sent to several, and their gradients summed; ``ring`` and ``all-gather`` have no
such limit, and send less then.

Tokens are held in the order of the other variants (``models.parameters.SequenceShard``), which the exchange
puts in order as it unpacks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.sequence_collectives import exchange_parts
from picotron_ray.errors import LayoutError
from picotron_ray.parallel.attention.backends import RowAttention


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts ``[ranks, ...]``, whose gradient is the same the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchange_parts(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return exchange_parts(gradients[0].contiguous(), ctx.group), None


def of_heads(heads: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Local tokens of all heads ``[b, heads, s, d]`` → whole rows of some heads ``[b, heads / n, n s, d]``.

    All tensors travel in one message.
    """
    ranks = group.size()
    sent = torch.cat([x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in heads], dim=2)
    came = _Exchange.apply(sent, group)  # [ranks, b, heads, s, d]: tokens of every rank
    first, second = came.chunk(2, dim=-2)
    row = torch.cat((*first.unbind(), *reversed(second.unbind())), dim=-2)
    return row.split([x.size(1) // ranks for x in heads], dim=1)


def of_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Invert `of_heads` for one tensor: ``[b, heads / n, n s, d]`` → ``[b, heads, s, d]``."""
    ranks = group.size()
    chunks = out.chunk(2 * ranks, dim=-2)
    pairs = (chunk for rank in range(ranks) for chunk in (chunks[rank], chunks[2 * ranks - 1 - rank]))
    sent = torch.stack(list(pairs)).unflatten(0, (ranks, 2))
    came = _Exchange.apply(sent, group)  # [ranks, 2, b, heads, s / 2, d]: heads of every rank
    return came.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)


class UlyssesAttention:
    """Attention kernel for the model: whole rows of some heads, by a kernel over whole rows.

    Args:
        group: the ranks that share rows.
        rows: attention over whole rows, see ``models.layers.attention.sdpa``.
    """

    def __init__(self, group: dist.ProcessGroup, rows: RowAttention) -> None:
        self._group, self._rows = group, rows

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        window: int | None = None,
        *sinks: Tensor,
    ) -> Tensor:
        """``[batch, heads, s, head]`` as of the local queries; LayoutError where ranks divide no heads.

        Of sinks ``[heads]``, where there are any, those of the heads that come here go with them. Their
        gradients are zero for the others, and summed with those of the other ranks like any parameter's.
        """
        if k.size(1) % self._group.size():
            raise LayoutError(
                f"layout.context: saw ulysses with cp={self._group.size()} and {k.size(1)} key heads on a"
                " rank, which it does not divide; use ring or all-gather"
            )
        q, k, v = of_heads((q.to(v.dtype), k.to(v.dtype), v), self._group)
        of_here = (x.chunk(self._group.size())[self._group.rank()] for x in sinks)
        return of_tokens(self._rows(q, k, v, documents, window, *of_here), self._group)
