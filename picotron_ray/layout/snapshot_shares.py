"""Shares of a state group that replicas of one node write: what a snapshot and what a flush holds. Pure.

A snapshot of all ranks needs one share of each. A flush, at the end of a generation, has to do without the
worker that died: each replica writes the share of the next one too, so the loss of any one of them loses
nothing of the newest step. A small state is flushed whole, so that one survivor is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from picotron_ray.layout.layout import Layout

WHOLE_BYTES = 256 << 20
"""A replica's state up to this size is flushed whole."""


def flushed_shares(index: int, count: int, state_bytes: float) -> tuple[int, ...]:
    """Return the shares that replica ``index`` of ``count`` on its node flushes.

    Args:
        state_bytes: of the whole state that each of them holds.

    >>> flushed_shares(3, 4, 1 << 40), flushed_shares(1, 2, 1 << 40), flushed_shares(1, 3, 4096)
    ((3, 0), (1, 0), (1, 2, 0))
    """
    several = count if state_bytes <= WHOLE_BYTES else min(2, count)
    return tuple((index + step) % count for step in range(several))


def fewest_replicas(layout: Layout, node_sizes: Sequence[int]) -> int:
    """Return the smallest number of replicas that share the copying of a state group on a node.

    Args:
        node_sizes: workers per node in rank order; empty: all on one node.

    >>> fewest_replicas(Layout(dp=8), (4, 4)), fewest_replicas(Layout(dp=2, tp=2), (4,))
    (4, 2)
    """
    nodes = [node for node, size in enumerate(node_sizes) for _ in range(size)] or [0] * layout.world_size
    nodes += [nodes[-1]] * (layout.world_size - len(nodes))
    places = Counter((nodes[rank], layout.state_group(rank)) for rank in range(layout.world_size))
    return min(places.values())
