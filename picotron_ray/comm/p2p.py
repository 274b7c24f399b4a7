"""Point-to-point messages: an uneven all-to-all, and a sum over two ranks.

`exchange` sends point to point on the default group. Ranks without data for each other take no part, and
ranks of other pipeline stages need not know how many exchanges there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.wire_bytes import OPTIMIZER, PIPELINE, SENT, size_bytes

SUM_TAG = 7  # differs from the tag of pipeline messages, the last of which may still be on the way


def exchange(
    outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, int], rank: int, like: Tensor
) -> dict[int, Tensor]:
    """Send tensors to peers and receive theirs (all-to-all of uneven parts).

    A part for this rank itself stays in the process.

    Args:
        outgoing: per receiving rank its tensors, packed in that order.
        incoming: per sending rank the number of elements that it packs.
        rank: this rank.
        like: gives the type on the wire, to which the tensors are cast, and the device.

    Returns one flat tensor per rank of ``incoming``. Raises RuntimeError when a peer is gone.
    """
    sent = {
        peer: torch.cat([x.reshape(-1).to(like.dtype) for x in parts]) for peer, parts in outgoing.items()
    }
    found = {peer: like.new_empty(count) for peer, count in incoming.items() if peer != rank}
    SENT.add(OPTIMIZER, sum(size_bytes(flat) for peer, flat in sent.items() if peer != rank))
    operations = [dist.P2POp(dist.isend, flat, peer) for peer, flat in sent.items() if peer != rank]
    operations += [dist.P2POp(dist.irecv, flat, peer) for peer, flat in found.items()]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return found | {rank: sent[rank]} if rank in incoming else found


def sum_with_peer_(x: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Sum ``x`` with the peer's, in place, to the same bits on both. Both ranks call it.

    The sum goes point to point and not over a group of two, which only these ranks would make. torch names a
    group by the number of groups that its rank has, so later groups would have other names on other ranks.

    Args:
        peer: its rank in the group.

    Raises RuntimeError when the peer is gone.
    """
    sent, found = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    SENT.add(PIPELINE, size_bytes(sent))
    operations = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=peer, tag=SUM_TAG),
        dist.P2POp(dist.irecv, found, group=group, group_peer=peer, tag=SUM_TAG),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    x += found
