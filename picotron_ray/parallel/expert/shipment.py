"""Rows of a micro-batch under way to the ranks of their experts and back, chunk by chunk.

A chunk is what goes to some of each rank's experts, and one all-to-all brings it there. All chunks start at
once. While the first one's experts compute the second one travels, and results go back while the next chunk
computes. An expert's products and its weights' gradients are the same as without chunks.

All buffers are received into in place: neither direction copies a chunk to put it beside the others.
Starts and waits stand apart in backward as in forward: the gradients of what came back all set off first,
then each chunk's is waited for, taken through its experts and sent on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.collectives import Collectives, RowExchange
from picotron_ray.models.layers.expert_counts import Counts
from picotron_ray.models.layers.expert_rows import Routes, permuted


class Transfer:
    """All-to-all of one chunk's rows, to its experts or back.

    Fields:
        sent, received: rows to and from every rank of the group.
        even: whether all of these numbers are the same, on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        collectives: Collectives,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        even: bool = False,
    ) -> None:
        self.group, self.collectives, self.even = group, collectives, even
        self.sent, self.received = list(sent), list(received)
        self._pending: RowExchange | None = None

    def start(self, rows: Tensor, *, back: bool = False, out: Tensor | None = None) -> Tensor:
        """Start a transfer of ``rows``; returns what they will fill: ``out`` or a new buffer."""
        outgoing, incoming = (self.received, self.sent) if back else (self.sent, self.received)
        self._pending = self.collectives.all_to_all(
            rows.contiguous(), incoming, outgoing, self.group, out=out, even=self.even
        )
        return self._pending.buffer

    def finish(self) -> None:
        """Wait for the rows."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None


class Chunks:
    """Transfers of all chunks, whose parts of a buffer lie one after the other.

    Args:
        rows: of the buffer here; those after the chunks' are not sent.
    """

    def __init__(self, transfers: Sequence[Transfer], rows: int) -> None:
        self.transfers, self.rows = list(transfers), rows

    def split(self, buffer: Tensor) -> Sequence[Tensor]:
        """Pieces of a buffer here, one for each chunk."""
        sizes = [sum(transfer.sent) for transfer in self.transfers]
        return buffer.split([*sizes, self.rows - sum(sizes)])[:-1]

    def room(self, like: Tensor) -> Tensor:
        """Make a buffer for what comes back, of rows like those given; rows that nothing comes to are 0."""
        found = like.new_empty((self.rows, *like.shape[1:]))
        found[sum(sum(transfer.sent) for transfer in self.transfers) :].zero_()
        return found

    def start(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Start all chunks; returns the buffers that they fill at their experts."""
        pieces = self.split(buffer)
        return tuple(t.start(piece) for t, piece in zip(self.transfers, pieces, strict=True))

    def finish(self) -> None:
        """Wait for all chunks."""
        for transfer in self.transfers:
            transfer.finish()


class _Sends(torch.autograd.Function):
    """Start of all chunks. The gradient's chunks come back into one buffer, and are waited for."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, chunks: Chunks, home: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.home = chunks, home
        return chunks.start(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.chunks.finish()
        return ctx.home.pop(), None, None


class _Arrives(torch.autograd.Function):
    """Arrival of a chunk. Backward sends its gradient back; the first to do so makes room for all."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, chunks: Chunks, number: int, home: list[Tensor]) -> Tensor:
        ctx.chunks, ctx.number, ctx.home = chunks, number, home
        chunks.transfers[number].finish()
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), chunks, home = gradients, ctx.chunks, ctx.home
        if not home:
            home.append(chunks.room(gradient))
        out = chunks.split(home[0])[ctx.number]
        chunks.transfers[ctx.number].start(gradient, back=True, out=out)
        return gradient, None, None, None


class _Returns(torch.autograd.Function):
    """Start of a chunk's way back, into its place among the others. Backward waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, chunks: Chunks, number: int, home: list[Tensor]) -> Tensor:
        ctx.transfer = transfer = chunks.transfers[number]
        if not home:
            home.append(chunks.room(rows))
        transfer.start(rows, back=True, out=chunks.split(home[0])[number])
        # Stands for the part in the graph, without memory. A view of the room would not do: FSDP's hooks
        # on a module's results have to sit on tensors of their own.
        return torch.empty_strided(rows.shape, (0, 0), dtype=rows.dtype, device=rows.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.transfer.finish()
        return gradients[0], None, None, None


class _Collects(torch.autograd.Function):
    """End of all chunks' way back. Backward starts the gradients of all, which `_Returns` waits for."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, home: list[Tensor], *parts: Tensor) -> Tensor:
        ctx.chunks = chunks
        chunks.finish()
        return home.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.chunks.start(gradients[0].contiguous())


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """Rows of a chunk at its experts.

    Fields:
        order, places: row of arrival at each place, grouped by expert and then by rank; and its inverse.
        counts: rows of each expert of the chunk.
    """

    order: Tensor
    places: Tensor
    counts: Counts


class RowShipment:
    """``Shipment`` within an ep group.

    Args:
        transfers: of each chunk.
        orders: of each chunk.
        experts: how many of this rank's experts each chunk is for.
    """

    def __init__(
        self,
        routes: Routes,
        transfers: Sequence[Transfer],
        orders: Sequence[ChunkOrder],
        experts: Sequence[int],
    ) -> None:
        self.routes, self.experts, self._orders = routes, experts, orders
        self._chunks = Chunks(transfers, len(routes.order))
        self._gradient: list[Tensor] = []  # room for what comes back, made by the first chunk that does
        self._results: list[Tensor] = []

    def send(self, rows: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _Sends.apply(rows, self._chunks, self._gradient)
        return found

    def arrive(self, chunk: int, buffer: Tensor) -> tuple[Tensor, Counts]:
        here = self._orders[chunk]
        arrived = _Arrives.apply(buffer, self._chunks, chunk, self._gradient)
        return permuted(arrived, here.order, here.places), here.counts

    def send_back(self, chunk: int, rows: Tensor) -> Tensor:
        here = self._orders[chunk]
        part: Tensor = _Returns.apply(
            permuted(rows, here.places, here.order), self._chunks, chunk, self._results
        )
        return part

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        found: Tensor = _Collects.apply(self._chunks, self._results, *parts)
        return found
