"""Rows by measured speed and blocks by measured time, against every way to share them out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.rebalance import (
    blocks_by_time,
    layout_by_speed,
    rows_by_speed,
    slowest_replica_s,
    step_s_by_speed,
)

pytestmark = pytest.mark.pure
_DRAW = random.Random(0)
NEAR = 1 + 1e-9


def shares(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to share out ``total`` with at least so many for each."""
    places = total - least * parts + parts - 1
    for bars in combinations(range(places), parts - 1):
        ends = (-1, *bars, places)
        yield tuple(b - a - 1 + least for a, b in pairwise(ends))


def speeds(count: int) -> list[float]:
    return [_DRAW.choice((1.0, 1.0, 1.3, 2.0, 3.0, _DRAW.uniform(0.5, 4))) for _ in range(count)]


def row_cases() -> Iterator[tuple[list[float], int, int]]:
    for _ in range(600):
        batch = _DRAW.randint(1, 13)
        yield speeds(_DRAW.randint(1, 4)), batch, _DRAW.randint(1, batch)


def test_no_rows_have_a_faster_slowest_replica() -> None:
    """600 drawn cases, each against every way to share its rows out."""
    for row_s, batch, micro_batch in row_cases():
        found = rows_by_speed(row_s, batch, micro_batch)
        least = 1 if batch >= len(row_s) else 0
        assert sum(found) == batch
        assert len(found) == len(row_s)
        assert min(found) >= least
        every = shares(batch, len(row_s), least)
        best = min(slowest_replica_s(row_s, rows, micro_batch) for rows in every)
        seconds = slowest_replica_s(row_s, found, micro_batch)
        assert seconds <= best * NEAR, (row_s, batch, micro_batch, found)


def test_no_layout_has_a_faster_slowest_replica() -> None:
    """Against every way to share the rows out, in every micro-batch that memory allows."""
    for row_s, batch, most in [*row_cases()][:200]:
        running = Layout(dp=len(row_s), micro_batch=min(most, _DRAW.randint(1, batch)))
        found = layout_by_speed(running, row_s, batch, most)
        least = 1 if batch >= len(row_s) else 0
        every = list(shares(batch, len(row_s), least))
        best = min(slowest_replica_s(row_s, rows, size) for rows in every for size in range(1, most + 1))
        seconds = step_s_by_speed(found, row_s, batch)
        assert seconds <= min(best, step_s_by_speed(running, row_s, batch)) * NEAR
        if found != running:
            assert seconds == slowest_replica_s(row_s, found.replica_rows, found.micro_batch)


def test_equal_replicas_stay_even() -> None:
    assert rows_by_speed([2.0] * 3, 8, 4) == (3, 3, 2)
    even = Layout(dp=4, micro_batch=3)
    assert layout_by_speed(even, [1.0] * 4, 24, 12) is even


def test_a_layout_that_may_not_run_is_left_out() -> None:
    running = Layout(dp=2, micro_batch=2)
    found = layout_by_speed(running, [1.0, 3.0], 16, 16, fits=lambda layout: layout.micro_batches(16) >= 4)
    assert found.micro_batches(16) >= 4
    assert step_s_by_speed(found, [1.0, 3.0], 16) < step_s_by_speed(running, [1.0, 3.0], 16)
    assert layout_by_speed(running, [1.0, 3.0], 16, 16, fits=lambda layout: False) is running


def test_four_workers_of_which_one_is_a_third_as_fast() -> None:
    """24 rows: no whole rows do better than eight on the fast ones."""
    found = layout_by_speed(Layout(dp=4, micro_batch=6), [1.0, 1.0, 1.0, 3.0], 24, 12)
    assert step_s_by_speed(found, [1.0, 1.0, 1.0, 3.0], 24) == 8.0


def test_thousands_of_replicas_are_shared_out() -> None:
    row_s = [1.0 + 0.5 * (index % 97 == 0) for index in range(4096)]
    rows = rows_by_speed(row_s, 16384, 8)
    assert sum(rows) == 16384
    assert slowest_replica_s(row_s, rows, 8) == 5.0


def stage_cases() -> Iterator[tuple[list[float], list[int], list[tuple[int, ...]], float, float]]:
    for _ in range(400):
        pp, virtual = _DRAW.choice(((2, 1), (3, 1), (4, 1), (2, 2), (3, 2)))
        schedule = _DRAW.choice(("interleaved-1f1b", "zbv")) if virtual == 2 else "1f1b"
        layout = Layout(pp=pp, schedule=schedule, virtual_stages=virtual)
        blocks = [_DRAW.randint(1, 3) for _ in range(layout.stages)]
        device = speeds(pp)
        first, last = _DRAW.choice((0.0, 0.3)), _DRAW.choice((0.0, 0.7, 2.0))
        ranks = [layout.rank_stages(rank) for rank in range(pp)]
        ends = [first * (s == 0) + last * (s == layout.stages - 1) for s in range(layout.stages)]
        of = {stage: rank for rank, held in enumerate(ranks) for stage in held}
        stage_s = [device[of[stage]] * (count + ends[stage]) for stage, count in enumerate(blocks)]
        yield stage_s, blocks, ranks, first, last


def test_no_blocks_have_a_faster_slowest_rank() -> None:
    """400 drawn pipelines, with virtual stages too, each against every cut of its layers."""
    for stage_s, blocks, ranks, first, last in stage_cases():
        found = blocks_by_time(stage_s, blocks, ranks, first, last)
        ends = [first, *[0.0] * (len(blocks) - 2), last]
        device = {
            stage: sum(stage_s[s] for s in held) / sum(blocks[s] + ends[s] for s in held)
            for held in ranks
            for stage in held
        }

        def slowest(cut: Sequence[int], ranks=ranks, device=device, ends=ends) -> float:
            return max(sum(device[s] * (cut[s] + ends[s]) for s in held) for held in ranks)

        assert sum(found) == sum(blocks)
        assert min(found) >= 1
        best = min(map(slowest, shares(sum(blocks), len(blocks), 1)))
        assert slowest(found) <= best * NEAR, (stage_s, blocks, ranks, found)
        for held in ranks:
            own = [found[stage] for stage in held]
            assert max(own) - min(own) <= 1, "the blocks of a rank are even"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rows_by_speed([1.0, 0.0], 4, 2), "row_s: saw"),
        (lambda: rows_by_speed([float("nan")], 4, 2), "positive number of seconds"),
        (lambda: rows_by_speed([1.0], 0, 2), "saw a batch of 0"),
        (lambda: blocks_by_time([1.0], (2, 2)), "saw 1 times for 2 stages"),
        (lambda: blocks_by_time([1.0, 1.0], (2, 2), [(0,), (0,)]), "on ranks"),
        (lambda: step_s_by_speed(Layout(dp=2), [1.0], 4), "saw 1 times, expected those of dp=2"),
    ],
)
def test_what_does_not_go_together_is_refused(call, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        call()
