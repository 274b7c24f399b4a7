"""Order of a layer's experts over the ranks of an expert-parallel group, balanced by their loads.

An order lists the experts of rank 0 of a group, then those of rank 1, and so on: each rank has as many. It is
balanced by greedy packing: the experts by falling load, each to the rank with the least load so far that has
room (longest processing time first, Graham 1969; the packing of EPLB, DeepSeek-AI 2025, without replicas).

Loads are whole numbers, and ties go to lower numbers: the same loads give the same order anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from picotron_ray.layout.shards import Box

GAIN = 0.05
"""Share of the busiest rank's load that another order must save: it moves experts and their state."""


def packed(loads: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Pack experts onto ranks, as many on each; those of a rank ascend.

    >>> packed((9, 8, 1, 1, 2, 3), 2)
    (0, 2, 4, 1, 3, 5)
    """
    room = len(loads) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        rank = min((r for r in range(ranks) if len(held[r]) < room), key=lambda r: (totals[r], r))
        held[rank].append(expert)
        totals[rank] += loads[expert]
    return tuple(expert for experts in held for expert in sorted(experts))


def imbalance(loads: Sequence[int], order: Sequence[int], ranks: int) -> float:
    """Load of the busiest rank over the mean; 1.0 where there is no load.

    >>> imbalance((3, 1, 1, 1), (), 2), imbalance((3, 1, 1, 1), (0, 2, 1, 3), 1)
    (1.3333333333333333, 1.0)

    Args:
        order: empty: experts are in the order of their numbers.
    """
    total, room = sum(loads), len(loads) // ranks
    order = order or range(len(loads))
    most = max(sum(loads[expert] for expert in order[at : at + room]) for at in range(0, len(order), room))
    return most * ranks / total if total else 1.0


def balanced(loads: Sequence[int], ranks: int, before: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the packed order where it saves `GAIN` of the busiest rank's load, else the one before.

    >>> balanced((9, 9, 1, 1), 2), balanced((9, 1, 9, 1), 2)
    ((0, 2, 1, 3), ())

    Args:
        before: the order that there is; empty, here and in what is returned: that of the experts' numbers.
    """
    found = packed(loads, ranks)
    if imbalance(loads, found, ranks) > (1.0 - GAIN) * imbalance(loads, before, ranks):
        found = tuple(before)
    return found if found != tuple(range(len(loads))) else ()


@lru_cache(maxsize=1024)
def places_of(order: tuple[int, ...]) -> tuple[int, ...]:
    """Place of each expert in an order.

    >>> places_of((2, 0, 1))
    (1, 2, 0)
    """
    places = [0] * len(order)
    for place, expert in enumerate(order):
        places[expert] = place
    return tuple(places)


def boxes_in_order(box: Box, order: Sequence[int]) -> tuple[Box, ...]:
    """Return the boxes of the uncut tensor, experts by number, that make up ``box``, whose rows are places.

    They are in the order of its rows. Neighbours with consecutive numbers are one.

    >>> boxes_in_order(Box((1, 0), (3, 5)), (3, 0, 1, 2))
    (Box(offset=(0, 0), size=(3, 5)),)
    """
    if not order or not box.numel:
        return (box,)
    (first, *offset), (count, *size) = box.offset, box.size
    return tuple(
        Box((expert, *offset), (length, *size)) for expert, length in _runs(order[first : first + count])
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and length of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], at - start
            start = at
