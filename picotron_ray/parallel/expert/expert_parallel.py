"""Expert parallelism: the experts of a block are spread over ranks, and tokens travel to them and back.

Experts are folded over the data axis. Every rank of an ep group feeds rows of its own and holds 1/ep of the
experts. The ranks with the same experts (the ``edp`` group) sum their gradients.

Counts are exchanged on the device, and so is the order of arriving rows computed (`arrival_order`). What the
host must know is how many rows go to each rank, since the backend's all-to-all takes its sizes from there:

- ``exact``: each rank sends what it has. The host waits for counts, once in a micro-batch's pass through a
  layer: one small tensor holds those of all chunks and both directions. No exchange of uneven parts by NCCL
  goes without it. (An own ``hierarchical`` exchange tells its neighbours of their sizes, and waits once more
  in each.)
- ``padded``: each rank sends as much as could ever go, by ``capacity_factor`` or by the number of tokens, and
  nobody waits for anything. It costs bytes: ``capacity_factor`` times those of even routes, or without one
  ``min(ep, experts / top_k)`` times.

See `shipment` for how transfers and experts overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.comm.collectives.collectives import Collectives
from picotron_ray.comm.renamed import all_gather_single
from picotron_ray.comm.wire_bytes import EXPERTS, SENT, ring_share, size_bytes
from picotron_ray.errors import LayoutError
from picotron_ray.layout.expert_order import places_of
from picotron_ray.models.layers.expert_counts import Counts, read_counts
from picotron_ray.models.layers.expert_rows import Routes
from picotron_ray.models.layers.transport import RouteLimits
from picotron_ray.parallel.expert.shipment import ChunkOrder, RowShipment, Transfer
from picotron_ray.parallel.shard_boxes import chunk


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """Form in which rows travel to experts.

    Fields:
        padded: whether every rank sends as many rows as could ever go; else those that go.
        chunks: transfers of a micro-batch's rows, each for some of a rank's experts.
        widest_rows: rows of the largest micro-batch that any rank of the group feeds, for ``padded``.
    """

    padded: bool = False
    chunks: int = 1
    widest_rows: int = 1

    def __str__(self) -> str:
        how = "padded" if self.padded else "exact, for which the host waits once a layer,"
        return f"{how} in {self.chunks} chunk{'s' if self.chunks > 1 else ''}"


EXACT = ExpertExchange()


def arrival_order(incoming: Tensor, rows: int, pitch: int | None, even: int) -> ChunkOrder:
    """Order the rows that ranks send, each grouped by expert, by expert and then by rank.

    Args:
        incoming: ``[ranks, experts]`` int64, on the device.
        rows: of the buffer in which they arrive, rank after rank.
        pitch: rows between the starts of two ranks; None: they follow each other.
        even: rows that are there where routes are even.
    """
    flat = incoming.flatten()
    if pitch is None:
        starts = flat.cumsum(0) - flat
    else:
        ranks = torch.arange(len(incoming), device=incoming.device).unsqueeze(1) * pitch
        starts = (incoming.cumsum(1) - incoming + ranks).flatten()
    lengths = incoming.t().flatten()
    ends = lengths.cumsum(0)
    moved = starts.view_as(incoming).t().flatten() - (ends - lengths)
    # the last block is of what carries no row: it points past the end
    moved = torch.cat((moved, moved.new_full((1,), rows)))
    lengths = torch.cat((lengths, rows - ends[-1:]))
    every = torch.arange(rows, device=incoming.device)
    block_moved = torch.repeat_interleave(moved, lengths, output_size=rows)
    order = (every + block_moved).clamp_(max=rows)
    places = every.new_zeros(rows + 1).scatter_(0, order, every)[:-1]
    return ChunkOrder(order.clamp(max=max(0, rows - 1)), places, Counts(incoming.sum(dim=0), even))


class ExpertTransport:
    """``Transport`` for the model: all-to-all within an ep group.

    Args:
        experts: of the whole mixture.
        exchange: how rows travel.
        order: the experts as the group's ranks have them (`layout.expert_order`); empty: by their numbers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        experts: int,
        collectives: Collectives | None = None,
        exchange: ExpertExchange = EXACT,
        order: tuple[int, ...] = (),
    ) -> None:
        self._group, self._collectives = group, collectives or Collectives(EXPERTS)
        self._exchange = exchange
        self._ranks, self._local = group.size(), experts // group.size()
        count = min(self._exchange.chunks, self._local)
        self._sizes = [chunk(self._local, count, number)[1] for number in range(count)]
        self._sizes = [size for size in self._sizes if size]
        self._order = self._slot_of_each(places_of(order) if order else range(experts))
        self._slots: Tensor | None = None
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}

    def _slot_of_each(self, places: Sequence[int]) -> list[int]:
        """Slots are by chunk, then by rank, then by the place of the expert there."""
        firsts = [0, *accumulate(self._sizes)]
        found = []
        for of_all in places:
            rank, place = divmod(of_all, self._local)
            number = max(n for n in range(len(self._sizes)) if firsts[n] <= place)
            found.append(self._ranks * firsts[number] + rank * self._sizes[number] + place - firsts[number])
        return found

    def slots(self, device: torch.device) -> Tensor | None:
        if self._order == list(range(len(self._order))):
            return None
        if self._slots is None:
            self._slots = torch.tensor(self._order, device=device)
        return self._slots

    def plan(self, routes: Routes, limits: RouteLimits) -> RowShipment:
        outgoing = [
            part.view(self._ranks, -1)
            for part in routes.counts.split([self._ranks * size for size in self._sizes])
        ]
        sent = torch.cat(outgoing, dim=1)
        incoming = torch.empty_like(sent)
        SENT.add(self._collectives.purpose, ring_share(size_bytes(sent), self._ranks))
        dist.all_to_all_single(incoming, sent, group=self._group)
        if self._exchange.padded:
            return self._padded(routes, outgoing, incoming, limits)
        return self._exact(routes, sent, incoming)

    def _exact(self, routes: Routes, sent: Tensor, incoming: Tensor) -> RowShipment:
        both = torch.stack((sent.flatten(), incoming.flatten()))
        # by rank, then by chunk: a list of the rows of each expert
        out, back = (self._by_chunk(numbers) for numbers in read_counts(both, routes.assignments))
        transfers, orders = [], []
        for number, (here, columns) in enumerate(
            zip(self._sizes, incoming.split(self._sizes, dim=1), strict=True)
        ):
            received = [sum(of_rank[number]) for of_rank in back]
            transfers.append(self._transfer([sum(of_rank[number]) for of_rank in out], received))
            order = arrival_order(columns, sum(received), None, 0)
            known = [sum(of_rank[number][place] for of_rank in back) for place in range(here)]
            counts = Counts(order.counts.on_device, 0, known)
            orders.append(ChunkOrder(order.order, order.places, counts))
        return RowShipment(routes, transfers, orders, self._sizes)

    def _by_chunk(self, numbers: Sequence[int]) -> list[list[Sequence[int]]]:
        ends = [0, *accumulate(self._sizes)]
        return [
            [
                numbers[rank * self._local + first : rank * self._local + last]
                for first, last in pairwise(ends)
            ]
            for rank in range(self._ranks)
        ]

    def _padded(
        self, routes: Routes, outgoing: Sequence[Tensor], incoming: Tensor, limits: RouteLimits
    ) -> RowShipment:
        rows, top_k = self._exchange.widest_rows, routes.top_k
        pitches = [
            rows * min(limits.per_expert * size, limits.length * min(top_k, size)) for size in self._sizes
        ]
        starts, experts = self._constants(pitches, routes.order.device)
        by_block = torch.cat([part.sum(dim=1) for part in outgoing])  # chunk after chunk, rank after rank
        shift = starts - (by_block.cumsum(0) - by_block)
        shift = torch.repeat_interleave(shift, experts, output_size=self._ranks * self._local)
        moved = routes.moved(shift, self._ranks * sum(pitches) + 1)
        transfers, orders = [], []
        for size, pitch, columns in zip(
            self._sizes, pitches, incoming.split(self._sizes, dim=1), strict=True
        ):
            same = [pitch] * self._ranks
            transfers.append(self._transfer(same, same, even=True))
            even = routes.assignments * size // self._local
            orders.append(arrival_order(columns, self._ranks * pitch, pitch, even))
        return RowShipment(moved, transfers, orders, self._sizes)

    def _constants(self, pitches: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """First row of each block in a padded buffer, and experts of each; sent to the device once."""
        key = (*pitches, device)
        if key not in self._known:
            ends = [0, *accumulate(pitches)]
            starts = [
                self._ranks * end + rank * pitch
                for end, pitch in zip(ends[:-1], pitches, strict=True)
                for rank in range(self._ranks)
            ]
            sizes = [size for size in self._sizes for _ in range(self._ranks)]
            self._known[key] = torch.tensor(starts, device=device), torch.tensor(sizes, device=device)
        return self._known[key]

    def _transfer(self, sent: Sequence[int], received: Sequence[int], *, even: bool = False) -> Transfer:
        return Transfer(self._group, self._collectives, sent, received, even=even)


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
        room = counts.new_empty((self.parts * len(counts), *counts.shape[1:]))
        all_gather_single(room, counts, group=self._group)
        found = room.view(self.parts, *counts.shape)
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
    exchange: ExpertExchange = EXACT,
    orders: Sequence[tuple[int, ...]] = (),
) -> None:
    """Spread the experts of every mixture (on the meta device) over ``ep``.

    Args:
        mixtures: the mixtures that the model's plan names (``models.layers.moe.MixtureOfExperts``).
        cp: group over which rows are cut, None where they are whole.
        tp: ranks that compute the same tokens.
        collectives: by which rows travel; None: the backend's.
        exchange: how they travel.
        orders: of each mixture's experts over ``ep``, as `ExpertTransport` has it; empty: by their numbers.

    Raises LayoutError where the experts do not divide, or an order is none of them.
    """
    for mixture, order in zip(mixtures, orders or repeat(()), strict=False):
        mixture.router.shares = tp
        if cp is not None:
            mixture.router.spread = SequenceSpread(cp)
        if ep is None:
            continue
        experts = mixture.router.config.experts
        if order and sorted(order) != list(range(experts)):
            raise LayoutError(f"layout.expert_order: saw {order}, expected each of {experts} experts once")
        mixture.transport = ExpertTransport(ep, experts, collectives, exchange, order)
        for name, whole in list(mixture.experts.named_parameters()):
            experts, *rest = whole.shape
            if experts % ep.size():
                raise LayoutError(f"layout.ep: saw {ep.size()}, which does not divide {experts} experts")
            empty = whole.new_empty((experts // ep.size(), *rest))
            part = nn.Parameter(empty, requires_grad=whole.requires_grad)
            setattr(mixture.experts, name, part)
