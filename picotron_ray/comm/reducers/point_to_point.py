"""Own all-reduce over point-to-point messages: ring, tree, one-shot mesh, and two levels of them.

Any consecutive or scattered ranks of a group can take part, so that two levels need no further groups. A
message holds at most ``chunk_bytes``. All results are the same bits on every rank: each element is added up
at one rank, or in one order.

============  ===================================================  ====================  ==============
algorithm     source                                               rounds                bytes sent
============  ===================================================  ====================  ==============
ring          Patarasuk & Yuan 2009                                2 (R - 1)             2 (R - 1) / R n
tree          binomial reduce and broadcast, Thakur et al. 2005    2 ceil(log2 R)        at most n per round
mesh          each to each, added in the order of ranks            1                     (R - 1) n
============  ===================================================  ====================  ==============
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.wire_bytes import GRADIENTS, SENT

TAG = 11
"""Differs from those of pipeline messages and of `p2p`."""
CHUNK_BYTES = 4 * 2**20


class Peers:
    """Some ranks of a group that exchange messages, seen from one of them.

    Args:
        ranks: of the group, in the order that counts here; None: all.
        chunk_bytes: largest message.

    Fields:
        index, count: place of this rank among them, and their number.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._group, self._chunk_bytes = group, chunk_bytes
        self._ranks = list(range(group.size())) if ranks is None else list(ranks)
        self.index, self.count = self._ranks.index(group.rank()), len(self._ranks)

    def swap(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Send contiguous tensors to peers and receive into others, all at once. Indices count `Peers`."""
        operations = []
        for peer, tensor in outgoing:
            SENT.add(GRADIENTS, tensor.numel() * tensor.element_size())
            operations += [self._operation(dist.isend, piece, peer) for piece in self._cut(tensor)]
        for peer, tensor in incoming:
            operations += [self._operation(dist.irecv, piece, peer) for piece in self._cut(tensor)]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _operation(self, operation: Callable[..., object], piece: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, piece, group=self._group, group_peer=self._ranks[peer], tag=TAG)

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(max(1, self._chunk_bytes // tensor.element_size())) if tensor.numel() else ()


def parts_of(flat: Tensor, peers: Peers) -> list[Tensor]:
    """Cut ``[n]`` into one part per peer, some an element longer than others."""
    return list(flat.tensor_split(peers.count))


def reduce_scatter_ring_(flat: Tensor, peers: Peers) -> Tensor:
    """Sum ``flat`` round a ring; returns this peer's part of the sum, a view. The rest is undefined."""
    parts, mine, count = parts_of(flat, peers), peers.index, peers.count
    room = torch.empty_like(parts[0])
    for turn in range(count - 1):
        sent, found = parts[(mine - 1 - turn) % count], parts[(mine - 2 - turn) % count]
        received = room[: found.numel()]
        peers.swap([((mine + 1) % count, sent)], [((mine - 1) % count, received)])
        found += received
    return parts[mine]


def all_gather_ring_(flat: Tensor, peers: Peers) -> None:
    """Pass each peer's part of ``flat`` round a ring, until all have all."""
    parts, mine, count = parts_of(flat, peers), peers.index, peers.count
    for turn in range(count - 1):
        sent, found = parts[(mine - turn) % count], parts[(mine - 1 - turn) % count]
        peers.swap([((mine + 1) % count, sent)], [((mine - 1) % count, found)])


def ring_(flat: Tensor, peers: Peers) -> None:
    """Sum ``flat`` over the peers, in place."""
    reduce_scatter_ring_(flat, peers)
    all_gather_ring_(flat, peers)


def tree_(flat: Tensor, peers: Peers) -> None:
    """Sum ``flat`` up a binomial tree to the first peer, and send the sum down again."""
    received, apart = torch.empty_like(flat), 1
    while apart < peers.count:
        if peers.index % (2 * apart) == apart:
            peers.swap([(peers.index - apart, flat)], [])
            break
        if peers.index + apart < peers.count:
            peers.swap([], [(peers.index + apart, received)])
            flat += received
        apart *= 2
    broadcast_(flat, peers)


def broadcast_(flat: Tensor, peers: Peers) -> None:
    """Send the first peer's ``flat`` down a binomial tree."""
    apart = 1
    while apart < peers.count:
        apart *= 2
    while (apart := apart // 2) >= 1:
        if peers.index % (2 * apart) == apart:
            peers.swap([], [(peers.index - apart, flat)])
        elif peers.index % (2 * apart) == 0 and peers.index + apart < peers.count:
            peers.swap([(peers.index + apart, flat)], [])


def mesh_(flat: Tensor, peers: Peers) -> None:
    """Send ``flat`` to all peers at once and add up what comes, in their order."""
    others = [peer for peer in range(peers.count) if peer != peers.index]
    found = {peer: torch.empty_like(flat) for peer in others}
    peers.swap([(peer, flat) for peer in others], list(found.items()))
    found[peers.index] = flat.clone()
    torch.add(found[0], found[1], out=flat) if peers.count > 1 else None
    for peer in range(2, peers.count):
        flat += found[peer]


ALGORITHMS: dict[str, Callable[[Tensor, Peers], None]] = {"ring": ring_, "tree": tree_, "mesh": mesh_}


class TwoLevels:
    """Neighbours inside, one of each neighbourhood across: most bytes stay inside.

    Reduce-scatter inside, all-reduce of each part across, all-gather inside (Mikami et al. 2018). So every
    rank takes part across, with its part alone.

    Args:
        inner: ranks of a neighbourhood, a divisor of the group's size.
        across: algorithm between neighbourhoods.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        inner: int,
        across: str = "ring",
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        place, first = group.rank() % inner, group.rank() // inner * inner
        self._inside = Peers(group, range(first, first + inner), chunk_bytes)
        self._across = Peers(group, range(place, group.size(), inner), chunk_bytes)
        self._leads = place == 0
        self._algorithm = ALGORITHMS[across]

    def all_reduce_(self, flat: Tensor) -> None:
        """Sum ``flat`` over the group, in place."""
        part = reduce_scatter_ring_(flat, self._inside)
        self._algorithm(part, self._across)
        all_gather_ring_(flat, self._inside)

    def broadcast_(self, flat: Tensor) -> None:
        """Send the group's first rank's ``flat`` to all: across to the first of each, then inside."""
        if self._leads:
            broadcast_(flat, self._across)
        broadcast_(flat, self._inside)
