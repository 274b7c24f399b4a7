"""Expert parallelism: the experts of a block are spread over ranks, and tokens travel to them and back.

Experts are folded over the data axis. Every rank of an ep group feeds rows of its own and holds 1/ep of the
experts. The ranks with the same experts (the ``edp`` group) sum their gradients.

A transfer is one all-to-all of uneven parts, after an all-to-all of the counts. Its start and its wait are
apart, forward and backward, so that the computation in between (the shared expert) hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.comm.collectives.collectives import Collectives, RowExchange
from picotron_ray.comm.wire_bytes import EXPERTS, SENT, ring_share, size_bytes
from picotron_ray.errors import LayoutError


class _Transfer:
    """All-to-all of rows that can run in either direction.

    Fields:
        sent, received: rows to and from every rank of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, collectives: Collectives, sent: list[int], received: list[int]
    ) -> None:
        self.group, self.collectives, self.sent, self.received = group, collectives, sent, received
        self._pending: RowExchange | None = None

    def start(self, rows: Tensor, back: bool = False) -> Tensor:
        """Start the transfer; returns the buffer that the rows will fill."""
        outgoing, incoming = (self.received, self.sent) if back else (self.sent, self.received)
        self._pending = self.collectives.all_to_all(rows.contiguous(), incoming, outgoing, self.group)
        return self._pending.buffer

    def finish(self) -> Tensor:
        """Wait for the rows."""
        assert self._pending is not None
        found, self._pending = self._pending.wait(), None
        return found


class _Start(torch.autograd.Function):
    """Start of a transfer. Its gradient is the rows that `_FinishTransfer` sent back meanwhile."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.finish(), None


class _FinishTransfer(torch.autograd.Function):
    """End of a transfer. Backward starts the gradient's transfer back, and `_Start` waits for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish().view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(gradients[0], back=True)
        return gradients[0], None


class _ReturningRows:
    """Rows on their way back from their experts."""

    def __init__(self, rows: Tensor, transfer: _Transfer) -> None:
        self._rows, self._transfer = rows, transfer

    def wait(self) -> Tensor:
        found: Tensor = _FinishTransfer.apply(self._rows, self._transfer)
        return found


class _IncomingRows:
    """Rows on their way to their experts.

    Args:
        counts: ``[ranks, local experts]`` rows that each rank sends for each expert here, on the CPU.
    """

    def __init__(self, rows: Tensor, transfer: _Transfer, counts: Tensor) -> None:
        self._rows, self._transfer, self._counts = rows, transfer, counts
        self._order = self._by_expert().to(rows.device, non_blocking=True)

    def _by_expert(self) -> Tensor:
        """Index of each row in the order of arrival, grouped by expert and then by rank."""
        ranks, experts = self._counts.shape
        owner = torch.arange(experts).repeat(ranks).repeat_interleave(self._counts.flatten())
        return owner.argsort(stable=True)

    def wait(self) -> tuple[Tensor, Tensor]:
        arrived = _FinishTransfer.apply(self._rows, self._transfer)
        return arrived[self._order], self._counts.sum(dim=0)

    def send_back(self, rows: Tensor) -> _ReturningRows:
        arrived = torch.empty_like(rows).index_copy(0, self._order, rows)
        there = self._transfer
        back = _Transfer(there.group, there.collectives, there.received, there.sent)
        return _ReturningRows(_Start.apply(arrived, back), back)


class ExpertTransport:
    """``Transport`` for the model: all-to-all within an ep group."""

    def __init__(self, group: dist.ProcessGroup, collectives: Collectives | None = None) -> None:
        self._group, self._collectives = group, collectives or Collectives(EXPERTS)

    def send(self, rows: Tensor, counts: Tensor) -> _IncomingRows:
        ranks = self._group.size()
        outgoing = counts.view(ranks, -1)
        incoming = torch.empty_like(outgoing)
        SENT.add(self._collectives.purpose, ring_share(size_bytes(outgoing), ranks))
        dist.all_to_all_single(incoming, outgoing.contiguous(), group=self._group)
        outgoing, incoming = outgoing.cpu(), incoming.cpu()
        sent, received = outgoing.sum(dim=1).tolist(), incoming.sum(dim=1).tolist()
        transfer = _Transfer(self._group, self._collectives, sent, received)
        return _IncomingRows(_Start.apply(rows, transfer), transfer, incoming)


class SequenceSpread:
    """``Spread`` for the model: rows that are cut over a cp group in head-tail order."""

    chunks = 2

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.parts = group.size()

    def totals(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def ahead(self, counts: Tensor) -> Tensor:
        found = [torch.empty_like(counts) for _ in range(self.parts)]
        dist.all_gather(found, counts, group=self._group)
        heads, tails = [pair[0] for pair in found], [pair[1] for pair in reversed(found)]
        chunks = torch.stack((*heads, *tails))
        before = chunks.cumsum(dim=0) - chunks
        mine = self._group.rank()
        return before[[mine, 2 * self.parts - 1 - mine]]


def apply_expert_parallel(
    mixtures: Sequence[Any],
    ep: dist.ProcessGroup | None,
    cp: dist.ProcessGroup | None,
    tp: int,
    collectives: Collectives | None = None,
) -> None:
    """Spread the experts of every mixture (on the meta device) over ``ep``.

    Args:
        mixtures: the mixtures that the model's plan names (``models.layers.moe.MixtureOfExperts``).
        cp: group over which rows are cut, None where they are whole.
        tp: ranks that compute the same tokens.
        collectives: by which rows travel; None: the backend's.

    Raises LayoutError where the experts do not divide.
    """
    for mixture in mixtures:
        mixture.router.shares = tp
        if cp is not None:
            mixture.router.spread = SequenceSpread(cp)
        if ep is None:
            continue
        mixture.transport = ExpertTransport(ep, collectives)
        for name, whole in list(mixture.experts.named_parameters()):
            experts, *rest = whole.shape
            if experts % ep.size():
                raise LayoutError(f"layout.ep: saw {ep.size()}, which does not divide {experts} experts")
            empty = whole.new_empty((experts // ep.size(), *rest))
            part = nn.Parameter(empty, requires_grad=whole.requires_grad)
            setattr(mixture.experts, name, part)
