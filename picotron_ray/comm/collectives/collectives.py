"""Collectives of one purpose, by the backend or by an own algorithm; which one may change between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.all_to_all import pairwise_, two_levels_
from picotron_ray.comm.collectives.gather import (
    gather_mesh_,
    gather_ring_,
    gather_two_levels_,
    scatter_mesh_,
    scatter_ring_,
    scatter_two_levels_,
)
from picotron_ray.comm.collectives.peers import CHUNK_BYTES, Peers, two_levels
from picotron_ray.comm.collectives.pending import PENDING
from picotron_ray.comm.renamed import all_gather_single, reduce_scatter_single
from picotron_ray.comm.wire_bytes import SENT, ring_share, size_bytes


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """Algorithm of collectives, as a job asks for it.

    Fields:
        algorithm: auto and flat (the backend's), ring, mesh, pairwise, hierarchical.
        inner: ranks of a neighbourhood, for hierarchical; None: consecutive ones of a group on one node.
        chunk_bytes: limit of one message of an own algorithm.
    """

    algorithm: str = "auto"
    inner: int | None = None
    chunk_bytes: int = CHUNK_BYTES

    @property
    def own(self) -> bool:
        """Whether messages are sent point to point."""
        return self.algorithm not in ("auto", "flat")


FLAT = CollectivePlan()


class Collectives:
    """Collectives of one purpose on this rank, over any groups.

    Args:
        purpose: under which bytes count (`wire_bytes`).
        inner: ranks of a group's neighbourhoods, where a plan does not say; 1: it has none.

    Fields:
        plan: the algorithm in use; all ranks of a group have the same.
        moved_bytes, cost_s: of buffers, and seconds that the host spent in collectives, since `begin`. On
            CUDA a call returns before its collective has begun: those are not counted.
    """

    def __init__(
        self,
        purpose: str,
        plan: CollectivePlan = FLAT,
        inner: Callable[[dist.ProcessGroup], int] = lambda group: 1,
    ) -> None:
        self.purpose, self.plan, self._inner = purpose, plan, inner
        self._peers: dict[tuple[CollectivePlan, dist.ProcessGroup], tuple[Peers, ...]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.moved_bytes, self.cost_s = 0, 0.0

    def use(self, plan: CollectivePlan) -> None:
        """Take another algorithm from now on; all ranks at the same place."""
        self.plan = plan

    def close(self) -> None:
        """Drop the groups."""
        self._peers.clear()

    def inner(self, group: dist.ProcessGroup) -> int:
        """Ranks of a neighbourhood of the group; 1: there are not two equal ones of at least two."""
        inner = self._inner(group) if self.plan.inner is None else self.plan.inner
        return inner if 1 < inner < group.size() and group.size() % inner == 0 else 1

    def all_gather(self, out: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``out [R n]`` with the ``part [n]`` of every rank, in their order; contiguous both."""
        with self._timed(size_bytes(out), out):
            if not self.plan.own:
                SENT.add(self.purpose, ring_share(size_bytes(out), group.size()))
                all_gather_single(out, part, group=group)
                return
            parts = out.view(-1).chunk(group.size())
            if parts[group.rank()].data_ptr() != part.data_ptr():
                parts[group.rank()].copy_(part.view(-1))
            self._run(parts, group, gather_mesh_, gather_ring_, gather_two_levels_)

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``out [n]`` with this rank's part of the sum of ``whole [R n]``; contiguous both.

        gloo's own reduce-scatter is an all-reduce of everything. Exchanging the parts and adding them here
        moves half the bytes.
        """
        with self._timed(size_bytes(whole), whole):
            if self.plan.own:
                work = whole.reshape(-1).clone()
                parts = work.chunk(group.size())
                self._run(parts, group, scatter_mesh_, scatter_ring_, scatter_two_levels_)
                out.copy_(parts[group.rank()].view_as(out))
                return
            SENT.add(self.purpose, ring_share(size_bytes(whole), group.size()))
            if dist.get_backend(group) == "gloo":
                received = torch.empty_like(whole)
                dist.all_to_all_single(received, whole, group=group)
                torch.sum(received.view(group.size(), *out.shape), dim=0, out=out)
            else:
                reduce_scatter_single(out, whole, group=group)

    def all_reduce_(self, x: Tensor, group: dist.ProcessGroup) -> None:
        """Sum a contiguous ``x`` over the group, in place, to the same bits on every rank."""
        with self._timed(size_bytes(x), x):
            if not self.plan.own:
                SENT.add(self.purpose, 2 * ring_share(size_bytes(x), group.size()))
                dist.all_reduce(x, group=group)
                return
            padded = torch.nn.functional.pad(x.view(-1), (0, -x.numel() % group.size()))
            parts = padded.chunk(group.size())
            self._run(parts, group, scatter_mesh_, scatter_ring_, scatter_two_levels_)
            self._run(parts, group, gather_mesh_, gather_ring_, gather_two_levels_)
            x.copy_(padded[: x.numel()].view_as(x))

    def all_to_all(
        self,
        rows: Tensor,
        incoming: Sequence[int],
        outgoing: Sequence[int],
        group: dist.ProcessGroup,
        *,
        out: Tensor | None = None,
        even: bool = False,
    ) -> RowExchange:
        """Start an exchange of ``rows``: ``outgoing[i]`` of them go to rank i, ``incoming[i]`` come from it.

        The backend's travels in the background; own algorithms run when it is waited for.

        Args:
            out: contiguous, what is received into; None: a new buffer.
            even: whether all numbers are the same, on all ranks of the group.
        """
        buffer = rows.new_empty((sum(incoming), *rows.shape[1:])) if out is None else out
        if self.plan.own:
            run = partial(self._exchange, buffer, rows, incoming, outgoing, group, even)
            return RowExchange(self, buffer, rows, run)
        mine = outgoing[group.rank()] * (size_bytes(rows[:1]) if len(rows) else 0)
        SENT.add(self.purpose, size_bytes(rows) - mine)
        with self._timed(0, buffer):
            work = dist.all_to_all_single(
                buffer, rows, list(incoming), list(outgoing), group=group, async_op=True
            )
        assert work is not None
        return RowExchange(self, buffer, rows, work.wait)

    def _exchange(
        self,
        buffer: Tensor,
        rows: Tensor,
        incoming: Sequence[int],
        outgoing: Sequence[int],
        group: dist.ProcessGroup,
        even: bool,
    ) -> None:
        peers = self._peers_of(group)
        if len(peers) == 1:
            pairwise_(buffer, rows, incoming, outgoing, *peers)
        else:
            two_levels_(buffer, rows, incoming, outgoing, *peers, even=even)

    def _run(
        self,
        parts: Sequence[Tensor],
        group: dist.ProcessGroup,
        mesh: Callable[..., None],
        ring: Callable[..., None],
        levels: Callable[..., None],
    ) -> None:
        peers = self._peers_of(group)
        if len(peers) == 2:
            levels(parts, *peers)
            return
        (mesh if self.plan.algorithm == "mesh" else ring)([[part] for part in parts], *peers)

    def _peers_of(self, group: dist.ProcessGroup) -> tuple[Peers, ...]:
        """All ranks of the group; or those inside and across, where there are two levels."""
        key = (self.plan, group)
        if key not in self._peers:
            inner = self.inner(group) if self.plan.algorithm == "hierarchical" else 1
            limit = self.plan.chunk_bytes
            if inner > 1:
                self._peers[key] = two_levels(group, inner, limit, self.purpose)
            else:
                self._peers[key] = (Peers(group, None, limit, self.purpose),)
        return self._peers[key]

    @contextmanager
    def _timed(self, nbytes: int, buffer: Tensor) -> Iterator[None]:
        began = time.perf_counter()
        self.moved_bytes += nbytes
        with PENDING.one():
            yield
        if buffer.device.type != "cuda":
            self.cost_s += time.perf_counter() - began


class RowExchange:
    """Exchange of rows under way."""

    def __init__(self, owner: Collectives, buffer: Tensor, rows: Tensor, run: Callable[[], object]) -> None:
        self.buffer = buffer
        self._owner, self._rows, self._run = owner, rows, run  # rows live until they are sent
        PENDING.issue()

    def wait(self) -> Tensor:
        """``[rows, ...]`` of all ranks, in their order."""
        with self._owner._timed(size_bytes(self._rows), self._rows):
            self._run()
        PENDING.end()
        return self.buffer
