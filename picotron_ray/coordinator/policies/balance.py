"""Balance: rows in proportion to the replicas' speed, blocks in proportion to the stages'.

The batch stays: rows only move between replicas, and their sum is what it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from picotron_ray.coordinator.messages import Member
from picotron_ray.coordinator.policies.bottleneck import much_slower
from picotron_ray.coordinator.policies.suggestions import Scene, Suggestion

COMPUTING = ("forward", "backward", "sync", "bubble")
"""Phases that the slowest replica or stage makes all others spend."""


def rows_by_speed(row_s: Sequence[float], rows: int) -> tuple[int, ...]:
    """Rows of each replica such that the slowest takes least, each at least one.

    Args:
        row_s: seconds per row.

    >>> rows_by_speed((1.0, 1.0, 1.0, 3.0), 24)
    (7, 7, 7, 3)
    """
    given = [1] * len(row_s)
    queue = [(2 * seconds, at) for at, seconds in enumerate(row_s)]
    heapq.heapify(queue)
    for _ in range(rows - len(row_s)):
        _, at = queue[0]
        given[at] += 1
        heapq.heapreplace(queue, ((given[at] + 1) * row_s[at], at))
    return tuple(given)


def rows_suggestion(
    scene: Scene, slow: Sequence[int], members: Sequence[Member], spares: int
) -> Iterator[Suggestion]:
    """Suggest fewer rows for slow replicas, or that spares take their places where they are much slower.

    Args:
        slow: replicas that have been slow for long enough.
        spares: workers that are ready and not members.
    """
    figures, layout = scene.figures, scene.layout
    row_s = figures.replica_row_s
    if len(row_s) != layout.dp or layout.dp < 2 or min(row_s) <= 0 or not slow:
        return
    if layout.world_size == layout.dp:
        hopeless = [at for at in slow if much_slower(row_s, at)][:spares]
        if hopeless:
            avoid = tuple(members[at].worker for at in hopeless)
            left = [seconds for at, seconds in enumerate(row_s) if at not in hopeless]
            middle = sorted(left)[len(left) // 2] if left else min(row_s)
            after = [middle if at in hopeless else seconds for at, seconds in enumerate(row_s)]
            even = replace(layout, replica_rows=())
            yield Suggestion(
                "rows", scene.settings, layout=even, saves=_saves(scene, after, _even(scene)), avoid=avoid
            )
            return
    rows = rows_by_speed(row_s, scene.job.data.global_batch)
    if rows != (figures.replica_rows or _even(scene)):
        changed = replace(layout, replica_rows=rows)
        yield Suggestion("rows", scene.settings, layout=changed, saves=_saves(scene, row_s, rows))


def _even(scene: Scene) -> tuple[int, ...]:
    batch = scene.job.data.global_batch
    spans = (scene.layout.rows(at, batch) for at in range(scene.layout.dp))
    return tuple(end - start for start, end in spans)


def _saves(scene: Scene, row_s: Sequence[float], rows: Sequence[int]) -> float:
    """Share of a step that the slowest replica takes less."""
    figures = scene.figures
    now_s = max(
        s * n for s, n in zip(figures.replica_row_s, figures.replica_rows or _even(scene), strict=True)
    )
    then_s = max(seconds * count for seconds, count in zip(row_s, rows, strict=True))
    return min(1.0, now_s / figures.step_s) * (1 - then_s / now_s) if now_s > 0 < figures.step_s else 0.0


def stages_suggestion(scene: Scene) -> Iterator[Suggestion]:
    """Suggest other numbers of blocks where a stage is slower than the others."""
    yield from ()
