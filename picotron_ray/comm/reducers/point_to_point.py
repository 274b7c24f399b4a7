"""Own all-reduce over point-to-point messages: ring, tree, one-shot mesh, and two levels of them.

Any consecutive or scattered ranks of a group can take part, so that two levels need no further groups. A
message holds at most ``chunk_bytes``. All results are the same bits on every rank: each element is added up
at one rank, or in one order.

============  ===================================================  ====================  ==============
algorithm     source                                               rounds                bytes sent
============  ===================================================  ====================  ==============
ring          Patarasuk & Yuan 2009                                2 (R - 1)             2 (R - 1) / R n
tree          binomial reduce and broadcast, Thakur et al. 2005    2 ceil(log2 R)        at most n per round
mesh          each to each, added in the order of ranks            1, large ones more    (R - 1) n
============  ===================================================  ====================  ==============
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.gather import gather_ring_, scatter_ring_
from picotron_ray.comm.collectives.peers import CHUNK_BYTES, Peers, two_levels
from picotron_ray.comm.reducers.mesh_bounds import piece_elements


def parts_of(flat: Tensor, peers: Peers) -> list[Sequence[Tensor]]:
    """Cut ``[n]`` into one part per peer, some an element longer than others."""
    return [[part] for part in flat.tensor_split(peers.count)]


def ring_(flat: Tensor, peers: Peers) -> None:
    """Sum ``flat`` over the peers, in place."""
    parts = parts_of(flat, peers)
    scatter_ring_(parts, peers)
    gather_ring_(parts, peers)


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
    """Send ``flat`` to all peers at once and add up what comes, in their order; large ones piece by piece."""
    for piece in flat.split(piece_elements(peers.count, flat.element_size())) if flat.numel() else ():
        _mesh_round_(piece, peers)


def _mesh_round_(flat: Tensor, peers: Peers) -> None:
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
        self._inside, self._across = two_levels(group, inner, chunk_bytes)
        self._algorithm = ALGORITHMS[across]

    def all_reduce_(self, flat: Tensor) -> None:
        """Sum ``flat`` over the group, in place."""
        parts = parts_of(flat, self._inside)
        scatter_ring_(parts, self._inside)
        self._algorithm(parts[self._inside.index][0], self._across)
        gather_ring_(parts, self._inside)

    def broadcast_(self, flat: Tensor) -> None:
        """Send the group's first rank's ``flat`` to all: across to the first of each, then inside."""
        if self._inside.index == 0:
            broadcast_(flat, self._across)
        broadcast_(flat, self._inside)
