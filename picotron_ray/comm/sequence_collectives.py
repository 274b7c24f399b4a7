"""Collectives along the sequence: gather, reduce-scatter (sequence parallel), shift, exchange (context)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.assigned import Issued, assigned
from picotron_ray.comm.renamed import all_gather_single, reduce_scatter_single
from picotron_ray.comm.wire_bytes import ring_share, size_bytes


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[batch, seq / n, ...]`` of every rank → ``[batch, seq, ...]`` on all of them."""
    gathered, own = _room(x, group), assigned(group)
    if own is None:
        all_gather_single(gathered, x.contiguous(), group=group)
    else:
        own.all_gather(gathered, x.contiguous(), group)
    return _in_order(gathered, x.shape)


class GatherAhead:
    """`gather_sequence` in the background."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        self._sent, self._gathered = x.contiguous(), _room(x, group)
        self._issued = Issued(group, ring_share(size_bytes(self._gathered), group.size()))
        self._work = all_gather_single(self._gathered, self._sent, group=group, async_op=True)

    def wait(self) -> Tensor:
        """``[batch, seq, ...]``, the ranks' parts in order."""
        self._work.wait()
        self._issued.end()
        return _in_order(self._gathered, self._sent.shape)


def _room(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Empty tensor for the ``x`` of every rank, one after the other."""
    return x.new_empty((group.size() * x.size(0), *x.shape[1:]))


def _in_order(gathered: Tensor, part: torch.Size) -> Tensor:
    batch, length, *rest = part
    return gathered.view(-1, batch, length, *rest).transpose(0, 1).reshape(batch, -1, *rest)


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[batch, seq, ...]`` → this rank's ``[batch, seq / n, ...]`` of the sum over ranks.

    gloo's own reduce-scatter is an all-reduce of everything. Exchanging the parts and adding them here moves
    half the bytes.
    """
    parts = group.size()
    batch, length, *rest = x.shape
    cut = x.view(batch, parts, length // parts, *rest).transpose(0, 1).contiguous()
    if (own := assigned(group)) is not None:
        found = torch.empty_like(cut[0])
        own.reduce_scatter(found, cut, group)
        return found
    if dist.get_backend(group) == "gloo":
        received = torch.empty_like(cut)
        dist.all_to_all_single(received, cut, group=group)
        return received.sum(dim=0)
    result = torch.empty_like(cut[0])
    reduce_scatter_single(result, cut.flatten(0, 1), group=group)
    return result


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: part i of a contiguous ``x [ranks, ...]`` goes to rank i; returns what came from each."""
    received, issued = torch.empty_like(x), Issued(group, ring_share(size_bytes(x), group.size()))
    dist.all_to_all_single(received, x, group=group)
    issued.end()
    return received


class Shift:
    """Ring shift in the background: send ``x`` to the next rank, receive as much from the one before.

    Args:
        tag: distinguishes shifts that are under way at once.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup, tag: int = 0) -> None:
        ranks, mine = group.size(), group.rank()
        self._sent = x.contiguous()
        self._received = torch.empty_like(self._sent)
        self._issued = Issued(group, size_bytes(x))
        after, before = (mine + 1) % ranks, (mine - 1) % ranks
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=before, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        """The tensor of the rank before. ``x`` may be written again afterwards."""
        for work in self._works:
            work.wait()
        self._issued.end()
        return self._received
