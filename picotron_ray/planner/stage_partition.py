"""Partition of layers into contiguous pipeline stages, so that the costliest stage costs least.

Solved exactly by dynamic programming over (stages, layers). A greedy cut at the mean is wrong at the ends,
where the embedding and the head lie.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from picotron_ray.errors import LayoutError

Bounds = tuple[tuple[int, int], ...]


def partition(costs: Sequence[float], first: float, last: float, stages: int) -> Bounds:
    """Half-open ranges of layers, one per stage, none empty.

    Args:
        costs: of every layer, any unit.
        first, last: further cost of the first and of the last stage.

    Among equals the earlier stages get more, because the last one's work begins last.

    >>> partition([1.0] * 5, first=0.0, last=1.0, stages=2)
    ((0, 3), (3, 5))

    Raises LayoutError where there are more stages than layers.
    """
    layers = len(costs)
    if stages > layers:
        raise LayoutError(
            f"layout.pp: saw {stages} stages for {layers} layers: expected a layer each; use a smaller pp"
        )
    if len(set(costs)) == 1 and costs[0] > 0:
        return _of_equal_layers(layers, first / costs[0], last / costs[0], stages)
    return _of_any_layers(costs, first, last, stages)


def cut_at(blocks: Sequence[int], layers: int) -> Bounds:
    """Half-open ranges of layers of stages with so many blocks each.

    >>> cut_at((3, 1), 4)
    ((0, 3), (3, 4))

    Raises LayoutError where they are not all layers, or a stage has none.
    """
    if sum(blocks) != layers or min(blocks) < 1:
        raise LayoutError(
            f"layout.stage_blocks: saw {list(blocks)}, expected a block or more each, {layers} in all"
        )
    ends = list(accumulate(blocks))
    return tuple((end - count, end) for end, count in zip(ends, blocks, strict=True))


def _of_equal_layers(layers: int, first: float, last: float, stages: int) -> Bounds:
    """The same where all layers cost 1: each stage takes as many as the best of the stages after it allow."""
    bounds, start = [], 0
    for left in range(stages, 1, -1):
        extra = first if start == 0 else 0.0
        most = _least_worst(layers - start, left, extra, last)
        here = min(math.floor(most - extra + SLACK), layers - start - (left - 1))
        bounds.append((start, start + here))
        start += here
    return (*bounds, (start, layers))


SLACK = 1e-9
"""Of a layer: what rounding may add to a stage's cost."""


def _least_worst(layers: int, stages: int, first: float, last: float) -> float:
    """Cost of the costliest stage of the best cut of equal layers of cost 1, at least one each."""
    even = (layers + first + last) / stages
    low, high = max(1, math.floor(even) - 1), layers + math.ceil(max(first, last)) + 1
    candidates = (
        most
        for whole in range(low, high)
        for most in sorted((whole, whole + first % 1, whole + last % 1))
        if _holds(layers, stages, first, last, most)
    )
    return next(candidates)


def _holds(layers: int, stages: int, first: float, last: float, most: float) -> bool:
    """Whether stages of at most this cost hold all layers, each at least one."""
    ends = [math.floor(most - extra + SLACK) for extra in (first, last)]
    between = math.floor(most + SLACK)
    if min(*ends, between) < 1:
        return False
    return sum(ends) + (stages - 2) * between >= layers


def _of_any_layers(costs: Sequence[float], first: float, last: float, stages: int) -> Bounds:
    layers, before = len(costs), [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        ends = (first if start == 0 else 0.0) + (last if end == layers else 0.0)
        return before[end] - before[start] + ends

    def cut(start: int, latest: int) -> tuple[float, int]:
        """The best end of a stage, at most ``latest``: (the costliest stage from ``start`` on, end).

        A longer stage costs more and leaves less to the others, so the best end is where the two meet.
        """
        ends = range(start + 1, latest + 1)
        meet = bisect_left(ends, True, key=lambda end: cost(start, end) >= worst[end])
        around = ends[max(0, meet - 1) : meet + 1]
        found, end = min((max(cost(start, end), worst[end]), -end) for end in around)
        return found, -end

    # worst[start]: the costliest stage of the best cut of layers start.. into the stages left
    worst = [cost(start, layers) for start in range(layers)]
    cuts: list[list[int]] = []
    for left in range(2, stages + 1):
        latest = layers - left + 1
        best = [cut(start, latest) for start in range(latest)]
        worst = [found for found, _ in best]
        cuts.append([end for _, end in best])
    bounds, start = [], 0
    for chosen in reversed(cuts):
        bounds.append((start, chosen[start]))
        start = chosen[start]
    return (*bounds, (start, layers))
