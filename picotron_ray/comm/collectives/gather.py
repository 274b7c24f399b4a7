"""Own all-gather and reduce-scatter over point-to-point messages: ring, one-shot mesh, and two levels.

A part is a list of tensors, so that what lies apart travels together. Bytes that a rank sends of ``n`` in
all, over ``R`` ranks:

=============  ==============================================  ==============  ====================
algorithm      source                                          rounds          across neighbourhoods
=============  ==============================================  ==============  ====================
ring           Patarasuk & Yuan 2009                           R - 1           (R - 1) / R n
mesh           each to each                                    1               (R - inner) / R n
hierarchical   across, then inside (Mikami et al. 2018)        K - 1, L - 1    (K - 1) / R n
=============  ==============================================  ==============  ====================

with ``K`` neighbourhoods of ``L`` ranks. A ring crosses each border of two neighbourhoods once, so there
its bytes are those of one rank; mesh and hierarchical cross from every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from picotron_ray.comm.collectives.peers import Peers

Parts = Sequence[Sequence[Tensor]]
"""By peer, the tensors of its part: of one shape each, whatever the peer."""


def gather_ring_(parts: Parts, peers: Peers) -> None:
    """Pass each peer's part round a ring, until all have all; this peer's is filled."""
    mine, count = peers.index, peers.count
    for turn in range(count - 1):
        sent, found = parts[(mine - turn) % count], parts[(mine - 1 - turn) % count]
        peers.swap([((mine + 1) % count, x) for x in sent], [((mine - 1) % count, x) for x in found])


def gather_mesh_(parts: Parts, peers: Peers) -> None:
    """Send this peer's part to all others at once."""
    others = [peer for peer in range(peers.count) if peer != peers.index]
    peers.swap(
        [(peer, x) for peer in others for x in parts[peers.index]],
        [(peer, x) for peer in others for x in parts[peer]],
    )


def scatter_ring_(parts: Parts, peers: Peers) -> None:
    """Sum the parts round a ring: this peer's holds its sum in the end, the others what was on the way."""
    mine, count = peers.index, peers.count
    room = [torch.empty_like(x) for x in parts[0]]
    for turn in range(count - 1):
        sent, found = parts[(mine - 1 - turn) % count], parts[(mine - 2 - turn) % count]
        received = [r[: x.numel()] for r, x in zip(room, found, strict=True)]
        peers.swap([((mine + 1) % count, x) for x in sent], [((mine - 1) % count, x) for x in received])
        for total, more in zip(found, received, strict=True):
            total += more


def scatter_mesh_(parts: Parts, peers: Peers) -> None:
    """Send every peer its part at once, and add up what comes in the order of peers."""
    others = [peer for peer in range(peers.count) if peer != peers.index]
    mine = parts[peers.index]
    found = {peer: [torch.empty_like(x) for x in mine] for peer in others}
    peers.swap(
        [(peer, x) for peer in others for x in parts[peer]],
        [(peer, x) for peer in others for x in found[peer]],
    )
    found[peers.index] = [x.clone() for x in mine]
    for place, total in enumerate(mine):
        total.copy_(found[0][place])
        for peer in range(1, peers.count):
            total += found[peer][place]


def _levels(parts: Sequence[Tensor], inside: Peers, across: Peers) -> tuple[Parts, Parts]:
    """Parts by neighbour, each with those at its place in every neighbourhood; and this place's parts."""
    by_place = [
        [parts[n * inside.count + place] for n in range(across.count)] for place in range(inside.count)
    ]
    return by_place, [[part] for part in by_place[inside.index]]


def gather_two_levels_(parts: Sequence[Tensor], inside: Peers, across: Peers) -> None:
    """Gather the parts at this rank's place in each neighbourhood, then those of the other places inside."""
    by_place, own = _levels(parts, inside, across)
    gather_ring_(own, across)
    gather_ring_(by_place, inside)


def scatter_two_levels_(parts: Sequence[Tensor], inside: Peers, across: Peers) -> None:
    """Sum inside first, each place for the same place everywhere; then across, a neighbourhood's part."""
    by_place, own = _levels(parts, inside, across)
    scatter_ring_(by_place, inside)
    scatter_ring_(own, across)
