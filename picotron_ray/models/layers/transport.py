"""Interfaces of a mixture to other ranks: transport of rows, sums over the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from picotron_ray.models.layers.expert_counts import Counts
from picotron_ray.models.layers.expert_rows import Routes


class RouteLimits(NamedTuple):
    """Bounds of a micro-batch's routes that hold whatever its tokens are.

    Fields:
        length: tokens of a row that are here.
        per_expert: assignments that one row's tokens here may have to one expert.
    """

    length: int
    per_expert: int


class Shipment(Protocol):
    """Rows of one micro-batch on their way to experts and back, in chunks by their experts.

    ``send`` starts all chunks. Then each is waited for (``arrive``) and sent back in turn, so that the
    others travel while its experts compute; ``collect`` waits for all.

    Fields:
        routes: where rows stand in what is sent, and in what comes back.
        experts: how many of those here each chunk is for.
    """

    routes: Routes
    experts: Sequence[int]

    def send(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows ``[m, hidden]`` as ``routes`` says → a buffer for each chunk, not yet filled."""
        ...

    def arrive(self, chunk: int, buffer: Tensor) -> tuple[Tensor, Counts]:
        """Rows ``[n, hidden]`` of a chunk, grouped by expert, and how many each has.

        After them may lie others, whose results nobody reads.
        """
        ...

    def send_back(self, chunk: int, rows: Tensor) -> Tensor:
        """Results of a chunk, in the order in which it arrived → what `collect` takes."""
        ...

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts of `send_back`, one a chunk → ``[m, hidden]`` as ``routes`` says; waits for them."""
        ...


class Transport(Protocol):
    """Brings rows to the ranks that hold their experts."""

    def slots(self, device: torch.device) -> Tensor | None:
        """Place of each expert in the order of sending, ``[experts]``; None: its number."""
        ...

    def plan(self, routes: Routes, limits: RouteLimits) -> Shipment: ...


class Spread(Protocol):
    """Sums over the ranks that hold other parts of the same rows.

    Fields:
        parts: ranks that share a row, evenly.
        chunks: consecutive stretches of it that are here.
    """

    parts: int
    chunks: int

    def totals(self, counts: Tensor) -> Tensor:
        """Sum of ``[rows, experts]`` over the ranks that share the rows."""
        ...

    def ahead(self, counts: Tensor) -> Tensor:
        """``[chunks, rows, experts]`` of the local chunks → the sums over all chunks before each."""
        ...


class Here:
    """All experts and whole rows on one rank: a transport and a spread that move nothing."""

    parts = chunks = 1

    def totals(self, counts: Tensor) -> Tensor:
        return counts

    def ahead(self, counts: Tensor) -> Tensor:
        return torch.zeros_like(counts)

    def slots(self, device: torch.device) -> None:
        """Experts stand by their numbers."""

    def plan(self, routes: Routes, limits: RouteLimits) -> Shipment:
        return _Staying(routes)


class _Staying:
    """Rows that stay where they are."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.experts: Sequence[int] = (len(routes.counts),)

    def send(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows,)

    def arrive(self, chunk: int, buffer: Tensor) -> tuple[Tensor, Counts]:
        return buffer, Counts(self.routes.counts, self.routes.assignments)

    def send_back(self, chunk: int, rows: Tensor) -> Tensor:
        return rows

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]
