"""Balance: rows in proportion to the replicas' speed, blocks to the stages' (`planner.rebalance`).

The batch stays: rows only move between replicas, and their sum is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import median

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.settings import with_settings
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.coordinator.messages import Member
from picotron_ray.coordinator.policies.bottleneck import much_slower
from picotron_ray.coordinator.policies.suggestions import ROOM, Scene, Suggestion
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import budget_bytes, memory_estimate
from picotron_ray.planner.model_sizes import head_blocks, stage_depth
from picotron_ray.planner.rebalance import blocks_by_time, layout_by_speed, rows_by_speed, step_s_by_speed

MOST_TRIED = 8
"""Sizes of a micro-batch, from one row on, that rows are shared out in."""
MANY = 1 << 16
"""Replicas times rows above which one size alone is looked at: the coordinator's loop waits meanwhile."""


def rows_suggestion(scene: Scene, slow: Sequence[int], members: Sequence[Member]) -> Iterator[Suggestion]:
    """Suggest fewer rows for slow replicas, or that spares take their places where they are much slower.

    Args:
        slow: replicas that have been slow for long enough.
    """
    layout, row_s = scene.layout, scene.figures.replica_row_s
    if len(row_s) != layout.dp or layout.dp < 2 or min(row_s) <= 0 or not slow:
        return
    hopeless = (
        [at for at in slow if much_slower(row_s, at)][: scene.spares]
        if layout.world_size == layout.dp
        else []
    )
    if hopeless:
        avoid = tuple(members[at].worker for at in hopeless)
        left = median([seconds for at, seconds in enumerate(row_s) if at not in hopeless] or row_s)
        after = [left if at in hopeless else seconds for at, seconds in enumerate(row_s)]
        even = replace(layout, replica_rows=())
        yield Suggestion("rows", scene.settings, layout=even, saves=_saves(scene, even, after), avoid=avoid)
        return
    found = _by_speed(scene, row_s)
    if found != layout:
        yield Suggestion("rows", scene.settings, layout=found, saves=_saves(scene, found, row_s))


def _by_speed(scene: Scene, row_s: Sequence[float]) -> Layout:
    """The layout with rows by speed; where there are very many, in micro-batches of the size that runs."""
    layout, batch = scene.layout, scene.job.data.global_batch
    if layout.dp * batch <= MANY:
        most = min(batch, max(layout.micro_batch, MOST_TRIED))
        return layout_by_speed(layout, row_s, batch, most, lambda other: _fits(scene, other))
    found = replace(layout, replica_rows=rows_by_speed(row_s, batch, layout.micro_batch))
    faster = step_s_by_speed(found, row_s, batch) < step_s_by_speed(layout, row_s, batch)
    return found if faster and _fits(scene, found) else layout


def _fits(scene: Scene, layout: Layout) -> bool:
    job = with_settings(scene.job, scene.settings)
    device = scene.question.device_bytes or inf
    room = min(ROOM * device, budget_bytes(job, device, scene.question.limit_bytes))
    most = max(scene.estimate_bytes, room)
    return not layout_problems(job, layout) and memory_estimate(job, layout).total_bytes <= most


def _saves(scene: Scene, layout: Layout, row_s: Sequence[float]) -> float:
    """Share of a step by which the slowest replica is done earlier."""
    figures, batch = scene.figures, scene.job.data.global_batch
    now_s = step_s_by_speed(scene.layout, figures.replica_row_s, batch)
    return _share(now_s - step_s_by_speed(layout, row_s, batch), figures.step_s)


def stages_suggestion(scene: Scene) -> Iterator[Suggestion]:
    """Suggest other numbers of blocks where a pipeline stage is slower than the others."""
    layout, stage_s, model = scene.layout, scene.figures.stage_s, scene.job.model
    if len(stage_s) != layout.stages or layout.pp < 2 or layout.placement or min(stage_s) <= 0:
        return
    blocks = tuple(stage_depth(model, layout.cut, stage) for stage in range(layout.stages))
    ranks = tuple(layout.rank_stages(rank) for rank in range(layout.pp))
    found = blocks_by_time(stage_s, blocks, ranks, 0.0, head_blocks(model))
    other = replace(layout, stage_blocks=found)
    if found == blocks or not _fits(scene, other):
        return
    ends = [0.0] * (len(blocks) - 1) + [head_blocks(model)]
    each = [seconds / (count + end) for seconds, count, end in zip(stage_s, blocks, ends, strict=True)]
    then = [seconds * (count + end) for seconds, count, end in zip(each, found, ends, strict=True)]
    slowest = max(sum(stage_s[stage] for stage in held) for held in ranks)
    after = max(sum(then[stage] for stage in held) for held in ranks)
    passes = layout.micro_batches(scene.job.data.global_batch) + layout.pp - 1
    saves = _share((slowest - after) * passes, scene.figures.step_s)
    yield Suggestion("stages", scene.settings, layout=other, saves=saves)


def _share(saved_s: float, step_s: float) -> float:
    return min(1.0, saved_s / step_s) if step_s > 0 else 0.0


# --- shares of another layout ------------------------------------------------------------------------


def is_uneven(layout: Layout) -> bool:
    """Whether rows or blocks are shared out by speed."""
    return bool(layout.replica_rows or layout.stage_blocks)


def evened(layout: Layout) -> Layout:
    """The layout with even rows and the planner's blocks."""
    return replace(layout, replica_rows=(), stage_blocks=())


def reshared(running: Layout, offered: Layout, row_s: Sequence[float], batch: int) -> Layout | None:
    """The offered layout with rows and blocks by speed, as far as the running one has them.

    None where its replicas or stages are others than those whose speed is known.

    Args:
        row_s: seconds per row of each replica of the running layout.
    """
    if (
        running.placement
        or offered.placement
        or any(getattr(running, axis) != getattr(offered, axis) for axis in ("dp", "tp", "pp", "cp", "ep"))
    ):
        return None
    if running.stage_blocks and running.virtual_stages != offered.virtual_stages:
        return None
    rows = rows_by_speed(row_s, batch, offered.micro_batch) if running.replica_rows else ()
    return with_rows(replace(offered, stage_blocks=running.stage_blocks), rows, batch)


def with_rows(layout: Layout, rows: tuple[int, ...], batch: int) -> Layout:
    """The layout that feeds these rows to its replicas; even ones are named by none."""
    even = replace(layout, replica_rows=())
    spans = [even.rows(at, batch) for at in range(layout.dp)]
    return even if rows == tuple(end - start for start, end in spans) else replace(even, replica_rows=rows)


def known_row_s(layout: Layout, row_s: Sequence[float]) -> tuple[float, ...]:
    """Seconds per row of each replica: measured ones, else by the rows that it was given; any unit.

    >>> known_row_s(Layout(dp=2, micro_batch=4, replica_rows=(4, 2)), ())
    (0.25, 0.5)
    """
    if len(row_s) == layout.dp and min(row_s) > 0:
        return tuple(row_s)
    return tuple(1 / max(rows, 1) for rows in layout.replica_rows or (1,) * layout.dp)


def rows_factor(running: Layout, layout: Layout, row_s: Sequence[float], batch: int) -> float:
    """Seconds of a layout's slowest replica over those by a cost model that was fitted to the running one.

    >>> running = Layout(dp=2, micro_batch=6, replica_rows=(6, 2))
    >>> rows_factor(running, running, (1.0, 3.0), 8)
    1.0
    >>> rows_factor(running, Layout(dp=2, micro_batch=4), (1.0, 3.0), 8)
    3.0
    """
    unit_s = step_s_by_speed(running, row_s, batch) / step_s_by_speed(running, [1.0] * running.dp, batch)
    return step_s_by_speed(layout, row_s, batch) / step_s_by_speed(layout, [unit_s] * layout.dp, batch)


def slowness(
    running: Layout,
    row_s: Sequence[float],
    stage_s: Sequence[float],
    model: ModelConfig,
    batch: int,
    shares: bool,
) -> float:
    """Factor as `rows_factor`, for a layout of other replicas or stages: all waits for the slowest worker.

    Args:
        stage_s: seconds per micro-batch of each stage of the running layout.
        shares: rows or blocks are shared out there too.
    """
    factor = 1.0
    if running.replica_rows:
        unit_s = step_s_by_speed(running, row_s, batch) / step_s_by_speed(running, [1.0] * running.dp, batch)
        factor *= _together(row_s, shares) / unit_s
    if running.stage_blocks and len(stage_s) == running.stages and min(stage_s) > 0:
        units = [float(stage_depth(model, running.cut, stage)) for stage in range(running.stages)]
        units[-1] += head_blocks(model)
        each = [seconds / many for seconds, many in zip(stage_s, units, strict=True)]
        ranks = [running.rank_stages(rank) for rank in range(running.pp)]
        slowest, most = (max(sum(of[at] for at in held) for held in ranks) for of in (stage_s, units))
        factor *= _together(each, shares) * most / slowest
    return factor


def _together(each: Sequence[float], shares: bool) -> float:
    """Seconds of a unit on workers that share units out by speed, or have as many each."""
    return len(each) / sum(1 / one for one in each) if shares else max(each)


def rows_for(
    layout: Layout, members: Sequence[str], source: Layout, before: Sequence[str], batch: int
) -> Layout:
    """The layout with rows for its members by those that they had; newcomers count like the median of all.

    Args:
        members: names by rank.
        source: the layout in which rows were shared out to ``before``, names by rank too.
    """
    given = known_row_s(source, ())
    slowness = {name: given[source.coordinates(rank).dp] for rank, name in enumerate(before)}
    row_s, usual = [0.0] * layout.dp, median(given)
    for rank, name in enumerate(members):
        at = layout.coordinates(rank).dp
        row_s[at] = max(row_s[at], slowness.get(name, usual))
    return with_rows(layout, rows_by_speed(row_s, batch, layout.micro_batch), batch)
