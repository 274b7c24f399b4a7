"""Own all-to-all of rows in uneven numbers, over point-to-point messages: pairwise, and in two levels.

``pairwise`` (Thakur et al. 2005, section 3.2) sends one part at a time, R - 1 of them: each link carries one
message at once. ``hierarchical`` (as DeepSpeed-MoE's, Rajbhandari et al. 2022) first hands each part to the
neighbour at the place of its target, then sends all that goes to a neighbourhood as one message: K - 1
messages cross instead of (K - 1) L, with as many bytes; inside, all rows travel once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from picotron_ray.comm.collectives.peers import Peers


def pairwise_(
    received: Tensor, sent: Tensor, incoming: Sequence[int], outgoing: Sequence[int], peers: Peers
) -> None:
    """Fill ``received`` with the peers' rows, in their order.

    Args:
        received, sent: ``[rows, ...]``, contiguous.
        incoming, outgoing: rows from and to each peer.
    """
    ins, outs = received.split(list(incoming)), sent.split(list(outgoing))
    ins[peers.index].copy_(outs[peers.index])
    for turn in range(1, peers.count):
        to, source = (peers.index + turn) % peers.count, (peers.index - turn) % peers.count
        peers.swap([(to, outs[to])], [(source, ins[source])])


def two_levels_(
    received: Tensor,
    sent: Tensor,
    incoming: Sequence[int],
    outgoing: Sequence[int],
    inside: Peers,
    across: Peers,
    *,
    even: bool = False,
) -> None:
    """Fill ``received`` as `pairwise_` does, by way of the neighbours at the place of each target.

    Args:
        even: whether all numbers of rows are the same, on all ranks. Else neighbours tell each other theirs,
            and the host waits for it.
    """
    neighbours, count = inside.count, across.count
    outs = sent.split(list(outgoing))
    given = [[outs[n * neighbours + place] for n in range(count)] for place in range(neighbours)]
    heights = [[outgoing[0]] * count] * neighbours if even else _told(given, inside).tolist()
    carried = [
        [sent.new_empty(int(height), *sent.shape[1:]) for height in row] for row in heights
    ]  # by neighbour that hands them over, for each neighbourhood
    others = [peer for peer in range(neighbours) if peer != inside.index]
    inside.swap(
        [(peer, rows) for peer in others for rows in given[peer]],
        [(peer, rows) for peer in others for rows in carried[peer]],
    )
    carried[inside.index] = given[inside.index]
    bundles = [torch.cat([carried[peer][n] for peer in range(neighbours)]) for n in range(count)]
    sums = [sum(incoming[n * neighbours : (n + 1) * neighbours]) for n in range(count)]
    pairwise_(received, torch.cat(bundles), sums, [len(bundle) for bundle in bundles], across)


def _told(given: Sequence[Sequence[Tensor]], inside: Peers) -> Tensor:
    """``[neighbours, neighbourhoods]`` rows that each neighbour hands to this one for each neighbourhood."""
    device = given[0][0].device
    mine = torch.tensor([[len(rows) for rows in row] for row in given], device=device)
    found = torch.empty_like(mine)
    found[inside.index] = mine[inside.index]
    others = [peer for peer in range(inside.count) if peer != inside.index]
    inside.swap([(peer, mine[peer]) for peer in others], [(peer, found[peer]) for peer in others])
    return found
