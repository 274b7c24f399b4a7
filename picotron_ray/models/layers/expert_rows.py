"""Rows of tokens as they go to experts and back, in an order that is made on the device.

Nothing here waits for a number: shapes follow from the number of assignments, not from how many are sent. A
buffer has a row for every assignment and one to spare at its end; those that are not sent (over capacity, of
rows of weight 0) point at the spare one, whose content nobody reads. What lies in rows that carry no
assignment may be anything, NaN too: it meets no sum, no gate and no weight's gradient.

The order comes from one stable sort of small integers (a radix sort on CUDA), counts from a search in its
result. ``bincount`` and ``argsort`` of counts on the host, which they replace, waited for the device.

To take rows and to sum them are each other's gradients, and both gather: a token's rows are summed by whoever
writes the token, k ascending. So bits repeat on any device, where `index_add` on CUDA adds in the order in
which threads arrive. The plain sum is torch's `embedding_bag`, which reads every row once and writes every
token once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_ray.models.sizes import GATED_PIECE_BYTES

SMALL = torch.iinfo(torch.int16).max
"""Most experts whose numbers are sorted as 16 bits: half the passes of a radix sort over 32."""


class Routes(NamedTuple):
    """Assignments of tokens to experts, and the rows that carry them.

    An assignment is ``token · top_k + k``; a slot the place of an expert in the order of sending.

    Fields:
        slots: ``[n]`` slot of each assignment's expert; that of one that is not sent is their number.
        counts: ``[slots]`` int64, assignments that are sent to each.
        order: ``[m]`` assignment in each row; any where the row carries none.
        places: ``[n]`` row of each assignment; m - 1, which carries none, where it is not sent.
        top_k: assignments of a token.
    """

    slots: Tensor
    counts: Tensor
    order: Tensor
    places: Tensor
    top_k: int

    @property
    def assignments(self) -> int:
        return len(self.places)

    def moved(self, shift: Tensor, rows: int) -> Routes:
        """Put rows elsewhere, into a buffer of ``rows``, of which the last is to spare.

        Args:
            shift: ``[slots]`` int64, by how many rows those of each slot move.
        """
        spare = self.order.new_full((1,), rows - 1)
        sent = self.slots < len(shift)
        by_slot = torch.cat((shift, shift.new_zeros(1)))
        places = torch.where(sent, self.places + by_slot[self.slots.long()], spare)
        every = torch.arange(self.assignments, device=places.device)
        order = every.new_zeros(rows).scatter_(0, places, every)
        return self._replace(order=order, places=places)


def sort_routes(experts: Tensor, kept: Tensor, count: int, slots: Tensor | None = None) -> Routes:
    """Order assignments by the slot of their experts, and within one as they come.

    Args:
        experts: ``[rows, seq, top_k]`` expert of each assignment.
        kept: the same shape, bool: whether it is sent.
        count: number of experts.
        slots: ``[experts]`` slot of each; None: its number.
    """
    wanted = experts if slots is None else slots[experts]
    small = torch.int16 if count < SMALL else torch.int32
    keys = torch.where(kept, wanted, count).flatten().to(small)
    ranked, order = keys.sort(stable=True)
    ends = torch.searchsorted(ranked, torch.arange(count, device=keys.device, dtype=small), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    every = torch.arange(len(order), device=keys.device)
    places = torch.empty_like(order).scatter_(0, order, every)
    places = torch.where(kept.flatten(), places, len(order))
    order = torch.cat((order, order.new_zeros(1)))
    return Routes(keys, counts, order, places, experts.size(-1))


def _summed(rows: Tensor, places: Tensor, top_k: int) -> Tensor:
    """Sum the rows of each token; the last row counts for nothing."""
    return F.embedding_bag(places.view(-1, top_k), rows, mode="sum", padding_idx=len(rows) - 1)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.top_k = top_k
        return tokens[order // top_k]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _summed(gradients[0], places, ctx.top_k), None, None, None


def _pieces(count: int, row_bytes: int) -> Iterator[slice]:
    """Cut so many rows into pieces of at most `GATED_PIECE_BYTES`."""
    each = max(1, GATED_PIECE_BYTES // max(1, row_bytes))
    return (slice(start, min(count, start + each)) for start in range(0, count, each))


class _Summed(torch.autograd.Function):
    """Rows times gates, in the wider type, are made a piece at a time: all of them are the largest tensor
    of a mixture, ``top_k`` hidden states of each token in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(rows, gates, order, places)
        ctx.top_k = top_k
        wide = torch.promote_types(rows.dtype, gates.dtype)
        out = rows.new_empty((len(places) // top_k, rows.size(-1)), dtype=wide)
        for piece in _pieces(len(out), top_k * rows.size(-1) * wide.itemsize):
            of = slice(piece.start * top_k, piece.stop * top_k)
            weighted = rows[places[of]] * gates[of].unsqueeze(-1)
            weighted.masked_fill_((places[of] == len(rows) - 1).unsqueeze(-1), 0.0)
            out[piece] = weighted.unflatten(0, (-1, top_k)).sum(dim=1)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, gates, order, places = ctx.saved_tensors
        (gradient,) = gradients
        by_row, products = torch.empty_like(rows), gradient.new_empty(len(rows))
        for piece in _pieces(len(rows), gradient[:1].nbytes):
            assignments = order[piece]
            given = gradient[assignments // ctx.top_k]
            products[piece] = (given * rows[piece]).sum(dim=-1)
            by_row[piece] = given.mul_(gates[assignments].unsqueeze(-1))
        by_gate = torch.where(places == len(rows) - 1, 0.0, products[places])
        return by_row, by_gate.to(gates.dtype), None, None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None


def rows_of(tokens: Tensor, routes: Routes) -> Tensor:
    """Return the token of each row: ``tokens [count, hidden]`` → ``[m, hidden]``."""
    found: Tensor = _Taken.apply(tokens, routes.order, routes.places, routes.top_k)
    return found


def gated_sum(rows: Tensor, gates: Tensor, routes: Routes) -> Tensor:
    """Sum the rows of each token's assignments, each times its gate, k ascending.

    Args:
        rows: ``[m, hidden]``.
        gates: ``[n]`` by assignment.

    Returns:
        ``[n / top_k, hidden]``, in the wider of the two types. Assignments that are not sent count as zero.
    """
    found: Tensor = _Summed.apply(rows, gates, routes.order, routes.places, routes.top_k)
    return found


def permuted(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return ``rows[order]``, whose gradient is taken by ``places``, where each row has come to."""
    found: Tensor = _Permuted.apply(rows, order, places)
    return found
