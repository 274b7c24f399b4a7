"""Placement over failure domains: replicas of one state group do not share a domain where they need not.

A rack or a zone that goes takes all slots on its nodes. The state survives in host memory where another
domain holds a replica of each state group. Which ranks are replicas follows from the layout; which node has
which ranks follows from the order of the nodes, so that order is chosen here. Only nodes with equally many
workers change places: groups that must stay inside a node (tensor parallelism) do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby

from picotron_ray.coordinator.messages import Member
from picotron_ray.layout.layout import Layout

MOST_NODES_SWAPPED = 16  # above that, pairs of nodes are not tried: only the regular orders are


def spread(members: Sequence[Member], layout: Layout, domains: Mapping[str, str]) -> tuple[Member, ...]:
    """The members in the order of ranks that leaves the fewest state groups to one failure domain alone.

    Args:
        members: of ``layout``, node by node; their order stays where no other is better.
        domains: failure domain by node, for those that have one; a node without is its own.
    """
    nodes = [list(group) for _, group in groupby(members, key=lambda member: member.node)]
    domain_of = [domains.get(group[0].node) or group[0].node for group in nodes]
    if layout.state_groups == layout.world_size or len(set(domain_of)) in (1, len(nodes)):
        return tuple(members)
    groups = [layout.state_group(rank) for rank in range(layout.world_size)]
    sizes = [len(group) for group in nodes]
    best = list(range(len(nodes)))
    least = _exposed(best, sizes, domain_of, groups)
    for order in _orders(sizes, domain_of):
        if least == 0:
            break
        if (found := _exposed(order, sizes, domain_of, groups)) < least:
            best, least = order, found
    if least and len(nodes) <= MOST_NODES_SWAPPED:
        best = _swapped(best, least, sizes, domain_of, groups)
    return tuple(member for node in best for member in nodes[node])


def _exposed(order: list[int], sizes: list[int], domain_of: list[str], groups: list[int]) -> int:
    """State groups that are on one domain alone."""
    holders: dict[int, str | None] = {}
    ranks = iter(groups)
    for node in order:
        for _ in range(sizes[node]):
            group = next(ranks)
            domain = domain_of[node]
            holders[group] = domain if holders.get(group, domain) == domain else None
    return sum(holder is not None for holder in holders.values())


def _orders(sizes: list[int], domain_of: list[str]) -> Iterator[list[int]]:
    """Orders in which domains take turns, after 1, 2, 4, ... nodes each."""
    block = 1
    while block < len(sizes):
        order: list[int] = []
        for _, same in groupby(range(len(sizes)), key=lambda node: sizes[node]):
            waiting: dict[str, list[int]] = {}
            for node in same:
                waiting.setdefault(domain_of[node], []).append(node)
            while any(waiting.values()):
                for queue in waiting.values():
                    order += queue[:block]
                    del queue[:block]
        yield order
        block *= 2


def _swapped(
    order: list[int], least: int, sizes: list[int], domain_of: list[str], groups: list[int]
) -> list[int]:
    """The order after exchanges of two nodes, for as long as one makes it better."""
    better = True
    while better and least:
        better = False
        for first, second in combinations(range(len(order)), 2):
            other = list(order)
            other[first], other[second] = order[second], order[first]
            if sizes[order[first]] != sizes[order[second]]:
                continue
            if (found := _exposed(other, sizes, domain_of, groups)) < least:
                order, least, better = other, found, True
    return order
