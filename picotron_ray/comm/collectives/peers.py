"""Ranks that exchange point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.wire_bytes import (
    ACTIVATIONS,
    CONTEXT,
    EXPERTS,
    GRADIENTS,
    PARAMETERS,
    SENT,
    size_bytes,
)

TAGS = {GRADIENTS: 11, ACTIVATIONS: 12, CONTEXT: 13, PARAMETERS: 14, EXPERTS: 15}
"""By purpose: messages of two that are under way at once must not meet. Pipelines, `p2p` and shifts have
others."""
CHUNK_BYTES = 4 * 2**20
Message = tuple[int, Tensor]
"""Peer, by its place among `Peers`, and a contiguous tensor."""


class Peers:
    """Some ranks of a group that exchange messages, seen from one of them.

    Args:
        ranks: of the group, in the order that counts here; None: all.
        chunk_bytes: largest message.
        purpose: under which sent bytes count (`wire_bytes`).

    Fields:
        index, count: place of this rank among them, and their number.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        purpose: str = GRADIENTS,
    ) -> None:
        self._group, self._chunk_bytes, self._purpose = group, chunk_bytes, purpose
        self._ranks = list(range(group.size())) if ranks is None else list(ranks)
        self.index, self.count = self._ranks.index(group.rank()), len(self._ranks)

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send tensors to peers and receive into others, all at once; empty ones are left out."""
        operations = []
        for peer, tensor in outgoing:
            SENT.add(self._purpose, size_bytes(tensor))
            operations += [self._operation(dist.isend, piece, peer) for piece in self._cut(tensor)]
        for peer, tensor in incoming:
            operations += [self._operation(dist.irecv, piece, peer) for piece in self._cut(tensor)]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _operation(self, operation: Callable[..., object], piece: Tensor, peer: int) -> dist.P2POp:
        tag = TAGS[self._purpose]
        return dist.P2POp(operation, piece, group=self._group, group_peer=self._ranks[peer], tag=tag)

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        limit = max(1, self._chunk_bytes // tensor.element_size())
        return tensor.view(-1).split(limit) if tensor.numel() else ()


def two_levels(
    group: dist.ProcessGroup, inner: int, chunk_bytes: int = CHUNK_BYTES, purpose: str = GRADIENTS
) -> tuple[Peers, Peers]:
    """Make the peers of this rank inside its neighbourhood of ``inner`` ranks, and across neighbourhoods.

    Ranks of a neighbourhood follow each other in the group. Across lie the ranks at this one's place in each.
    """
    place, first = group.rank() % inner, group.rank() // inner * inner
    inside = Peers(group, range(first, first + inner), chunk_bytes, purpose)
    return inside, Peers(group, range(place, group.size(), inner), chunk_bytes, purpose)
