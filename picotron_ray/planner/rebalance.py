"""Rebalancing by measured speed: whole rows to replicas, whole blocks to pipeline stages.

Both are the same problem: shares of a whole, each with a time that does not fall as it grows, of which the
slowest counts. To give one unit after the other to whoever would then finish first is exact for it (Ibaraki
and Katoh 1988, Resource Allocation Problems). The tests compare with every way to share.

Rows are computed in micro-batches, as many on all replicas. A replica that feeds ``r`` rows computes
``n * ceil(r / n)`` in ``n`` micro-batches. So every replica computes ``n`` rows at least, and a slow one
gains
from fewer and larger micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.stage_partition import SLACK


def rows_by_speed(row_s: Sequence[float], global_batch: int, micro_batch: int) -> tuple[int, ...]:
    """Rows of each DP replica for which the slowest one takes least time; their sum is the global batch.

    Every replica keeps a row, if there are enough. Among equals it is the one of fewest micro-batches.

    Args:
        row_s: seconds in which each replica computes a row, forward and backward; any unit.
        micro_batch: most rows per micro-batch, as in ``Layout.micro_batch``.

    >>> rows_by_speed([1.0, 1.0, 1.0, 3.0], global_batch=24, micro_batch=8)
    (8, 7, 7, 2)

    Raises:
        LayoutError: a time that is no positive number, or no row to share.
    """
    _check(row_s, "row_s")
    replicas, slowest = len(row_s), max(row_s)
    if global_batch < 1 or micro_batch < 1:
        raise LayoutError(f"rows: saw a batch of {global_batch} in micro-batches of {micro_batch}")
    least = 1 if global_batch >= replicas else 0
    best, best_s = tuple[int, ...](), math.inf
    for count in range(-(-global_batch // (replicas * micro_batch)), global_batch + 1):
        if slowest * count >= best_s:
            break
        if not _could_beat(row_s, global_batch, micro_batch, count, best_s):
            continue
        rows = _rows_in(row_s, global_batch, micro_batch, count, least)
        if rows and (seconds := slowest_replica_s(row_s, rows, micro_batch)) < best_s * (1 - SLACK):
            best, best_s = rows, seconds
    return best


def slowest_replica_s(row_s: Sequence[float], rows: Sequence[int], micro_batch: int) -> float:
    """Seconds of a step on the replica that takes longest, rows that only fill included.

    >>> slowest_replica_s([1.0, 1.0, 3.0], rows=(8, 8, 3), micro_batch=4)
    12.0
    """
    count = max(1, -(-max(rows) // micro_batch))
    return max(seconds * count * max(1, -(-mine // count)) for seconds, mine in zip(row_s, rows, strict=True))


def _could_beat(
    row_s: Sequence[float], global_batch: int, micro_batch: int, count: int, than_s: float
) -> bool:
    """Whether so many micro-batches have room for all rows in less time."""
    if math.isinf(than_s):
        return True
    room = (min(micro_batch, math.ceil(than_s / (seconds * count) - SLACK) - 1) for seconds in row_s)
    return sum(count * rows for rows in room) >= global_batch


def _rows_in(
    row_s: Sequence[float], global_batch: int, micro_batch: int, count: int, least: int
) -> tuple[int, ...]:
    """The best rows in exactly ``count`` micro-batches; empty where there are none.

    That many micro-batches are needed only where one replica has more rows than fit one fewer. None can bear
    them better than the fastest.
    """

    def seconds(replica: int, rows: int) -> float:
        return row_s[replica] * count * max(1, -(-rows // count))

    most = [count * micro_batch] * len(row_s)
    found = _shared(global_batch, [least] * len(row_s), most, seconds)
    needed = (count - 1) * micro_batch + 1
    if found and max(found) < needed:
        lowest = [least] * len(row_s)
        lowest[row_s.index(min(row_s))] = max(needed, least)
        found = _shared(global_batch, lowest, most, seconds)
    return found


def _shared(
    total: int, least: Sequence[int], most: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[int, ...]:
    """Shares of ``total`` of which the slowest takes least; empty where the limits do not allow it.

    Args:
        seconds: (who, its share) → its time, which does not fall as the share grows. Of equals the first one
            gets the next unit.
    """
    shares = list(least)
    left = total - sum(shares)
    if left < 0 or sum(most) < total:
        return ()
    waiting = [(seconds(who, share + 1), who) for who, share in enumerate(shares) if share < most[who]]
    heapq.heapify(waiting)
    for _ in range(left):
        _, who = waiting[0]
        shares[who] += 1
        if shares[who] < most[who]:
            heapq.heapreplace(waiting, (seconds(who, shares[who] + 1), who))
        else:
            heapq.heappop(waiting)
    return tuple(shares)


def layout_by_speed(
    layout: Layout,
    row_s: Sequence[float],
    global_batch: int,
    most_rows: int,
    fits: Callable[[Layout], bool] = lambda layout: True,
) -> Layout:
    """The layout with rows by measured speed, in the micro-batches by which the slowest gains most.

    Returns the layout as it is where nothing that fits is faster. Among equals it is the one of the running
    micro-batch, then of the smallest.

    Args:
        row_s: as in `rows_by_speed`, of ``layout.dp`` replicas.
        most_rows: of a micro-batch: as many as memory allows.
        fits: whether a layout may run, by the rules of layouts.

    >>> running = Layout(dp=4, micro_batch=1)
    >>> str(layout_by_speed(running, [1.0, 1.0, 1.0, 3.0], global_batch=24, most_rows=8))
    'dp4-tp1-pp1-mb4-rows8x2_6_2'
    """
    best, best_s = layout, step_s_by_speed(layout, row_s, global_batch)
    lowest_s = slowest_replica_s(row_s, rows_by_speed(row_s, global_batch, global_batch), global_batch)
    for size in sorted(range(1, most_rows + 1), key=lambda size: (size != layout.micro_batch, size)):
        if best_s <= lowest_s:
            break
        rows = rows_by_speed(row_s, global_batch, size)
        other = replace(layout, micro_batch=size, replica_rows=rows)
        seconds = step_s_by_speed(other, row_s, global_batch)
        if seconds < best_s * (1 - SLACK) and fits(other):
            best, best_s = other, seconds
    return best


def step_s_by_speed(layout: Layout, row_s: Sequence[float], global_batch: int) -> float:
    """Seconds that the slowest replica computes in a step of this layout.

    >>> step_s_by_speed(Layout(dp=4, micro_batch=6), [1.0, 1.0, 1.0, 3.0], global_batch=24)
    18.0
    """
    if len(row_s) != layout.dp:
        raise LayoutError(f"row_s: saw {len(row_s)} times, expected those of dp={layout.dp} replicas")
    count = layout.micro_batches(global_batch)
    return max(
        seconds * count * layout.micro_batch_rows(index, global_batch) for index, seconds in enumerate(row_s)
    )


def blocks_by_time(
    stage_s: Sequence[float],
    blocks: Sequence[int],
    rank_stages: Sequence[Sequence[int]] = (),
    first: float = 0.0,
    last: float = 0.0,
) -> tuple[int, ...]:
    """Blocks of each pipeline stage for which the slowest pipeline rank takes least time.

    Blocks are alike. So the time of a block on a rank is that of all its stages, shared out over their
    blocks; a slow device shows in it. A rank's blocks are spread evenly over its stages, the earlier ones
    first.

    Args:
        stage_s: measured seconds of every stage, for the same work each (a micro-batch, or a step).
        blocks: of every stage as measured.
        rank_stages: stages of every pipeline rank, as in ``Layout.rank_stages``; empty: one each, in order.
        first, last: cost of the embedding and of the head, in blocks (`planner.model_sizes.head_blocks`).

    >>> blocks_by_time([4.0, 12.0], blocks=(4, 4))
    (6, 2)

    Raises:
        LayoutError: a time that is no positive number, or lists that do not go together.
    """
    _check(stage_s, "stage_s")
    ranks = rank_stages or [(stage,) for stage in range(len(blocks))]
    if len(stage_s) != len(blocks) or sorted(s for held in ranks for s in held) != list(range(len(blocks))):
        raise LayoutError(f"stage_s: saw {len(stage_s)} times for {len(blocks)} stages on ranks {ranks}")
    ends = [0.0] * len(blocks)
    ends[0] += first
    ends[-1] += last
    extra = [sum(ends[stage] for stage in held) for held in ranks]
    now = [sum(blocks[stage] for stage in held) for held in ranks]
    block_s = [
        sum(stage_s[stage] for stage in held) / (count + more)
        for held, count, more in zip(ranks, now, extra, strict=True)
    ]
    shares = _shared(
        sum(blocks),
        [len(held) for held in ranks],
        [sum(blocks)] * len(ranks),
        lambda rank, count: block_s[rank] * (count + extra[rank]),
    )
    found = [0] * len(blocks)
    for held, share in zip(ranks, shares, strict=True):
        even, more = divmod(share, len(held))
        for place, stage in enumerate(sorted(held)):
            found[stage] = even + (place < more)
    return tuple(found)


def _check(seconds: Sequence[float], name: str) -> None:
    if not seconds or not all(math.isfinite(one) and one > 0 for one in seconds):
        raise LayoutError(f"{name}: saw {list(seconds)}, expected a positive number of seconds each")
