"""Cover checks over many boxes, in time n log n for what layouts cut; `shards.uncovered` is quadratic.

Boxes are first set apart by sweeps: along one axis they are sorted by offset, and a new group begins where
one starts at or after the end of all before it. Groups have nothing in common, so each is looked at alone,
and along the next axis is set apart further. Rows, columns and grids of them, with replicas, end as groups of
one place each. What no sweep sets apart is compared pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from picotron_ray.layout.shards import Box, uncovered

_MOST_SWEEPS = 4  # of a box along each axis: a staircase would lose one box to each


def groups(boxes: Sequence[Box]) -> Iterator[list[int]]:
    """Yield indices of boxes in groups; boxes of different groups have nothing in common.

    >>> rows = [Box((0, 0), (2, 4)), Box((2, 0), (2, 3)), Box((2, 2), (1, 2)), Box((0, 0), (2, 4))]
    >>> sorted(sorted(group) for group in groups(rows))
    [[0, 3], [1, 2]]
    """
    axes = len(boxes[0].offset) if boxes else 0
    left = [(list(range(len(boxes))), 0, 0, 0)] if boxes else []
    while left:
        group, axis, in_vain, sweeps = left.pop()
        if len(group) == 1 or in_vain == axes or sweeps == _MOST_SWEEPS * axes:
            yield group
            continue
        parts = _swept(boxes, group, axis)
        in_vain = in_vain + 1 if len(parts) == 1 else 1
        left += ((part, (axis + 1) % axes, in_vain, sweeps + 1) for part in parts)


def _swept(boxes: Sequence[Box], group: list[int], axis: int) -> list[list[int]]:
    """Set a group apart along one axis."""
    parts: list[list[int]] = []
    end = -math.inf
    for index in sorted(group, key=lambda index: boxes[index].offset[axis]):
        start = boxes[index].offset[axis]
        if start >= end:
            parts.append([])
        parts[-1].append(index)
        end = max(end, start + boxes[index].size[axis])
    return parts


def needed(boxes: Sequence[Box]) -> list[int]:
    """Indices of boxes without those that larger ones, or earlier ones of their size, cover together.

    >>> needed([Box((0,), (4,)), Box((3,), (3,)), Box((3,), (5,)), Box((4,), (4,))])
    [0, 2]
    """
    found: list[int] = []
    for group in groups(boxes):
        held: list[Box] = []
        for index in sorted(sorted(group), key=lambda index: -boxes[index].numel):
            if uncovered(boxes[index], held):
                found.append(index)
                held.append(boxes[index])
    return sorted(found)


def missing(box: Box, covers: Sequence[Box]) -> list[Box]:
    """The parts of ``box`` that no member of ``covers`` holds; empty: it is covered.

    >>> missing(Box((0,), (9,)), [Box((6,), (3,)), Box((0,), (5,))])
    [Box(offset=(5,), size=(1,))]
    """
    inside = [common for cover in covers if (common := cover.intersect(box)) is not None]
    held = 0
    for group in groups(inside):
        held += inside[group[0]].numel if len(group) == 1 else _union(inside, group)
    if held == box.numel:
        return []
    in_order = sorted(inside, key=lambda each: each.offset)  # so that little is left at a time
    return uncovered(box, in_order)


def _union(boxes: Sequence[Box], group: list[int]) -> int:
    """Elements that the boxes of a group hold together."""
    before: list[Box] = []
    count = 0
    for index in sorted(group, key=lambda index: -boxes[index].numel):
        fresh = uncovered(boxes[index], before)
        if fresh:
            count += sum(part.numel for part in fresh)
            before.append(boxes[index])
    return count
