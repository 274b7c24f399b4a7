"""Orders of experts: what packing gives, by hand and against what it promises."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from picotron_ray.layout.expert_order import GAIN, balanced, boxes_in_order, imbalance, packed, places_of
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, uncovered

LOADS = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.integers(1, 4).flatmap(
            lambda each: st.lists(st.integers(0, 1000), min_size=ranks * each, max_size=ranks * each)
        ),
    )
)


def test_packing_by_hand() -> None:
    """7 to rank 0, 6 to 1, 5 to 1 (which is full then), and what is left to 0."""
    assert packed((5, 0, 7, 6, 1, 2), 3) == (1, 2, 3, 4, 0, 5)
    assert packed((5, 1, 7, 6), 2) == (1, 2, 0, 3)
    assert packed((4, 4, 4, 4), 2) == (0, 2, 1, 3), "ties go to lower numbers, by turns"
    assert packed((0, 0), 2) == (0, 1)


@given(LOADS)
def test_every_rank_has_as_many_and_nearly_the_least_load(case: tuple[int, list[int]]) -> None:
    ranks, loads = case
    found, room = packed(loads, ranks), len(loads) // ranks
    assert sorted(found) == list(range(len(loads)))
    ranked = [found[at : at + room] for at in range(0, len(found), room)]
    assert all(list(experts) == sorted(experts) for experts in ranked)
    totals = [sum(loads[expert] for expert in experts) for experts in ranked]
    assert max(totals) - min(totals) <= max(loads), "no expert could go to the least loaded rank and help"
    assert packed(list(loads), ranks) == found


def test_packing_is_near_the_best_there_is() -> None:
    loads = (90, 70, 60, 50, 40, 30, 20, 10)
    best = min(imbalance(loads, order, 2) for order in permutations(range(8)) if order[0] == 0)
    assert best <= imbalance(loads, packed(loads, 2), 2) <= 1.01 * best
    assert imbalance(loads, (), 2) == 270 / 185


def test_experts_stay_where_moving_saves_little() -> None:
    even, skewed = (10, 10, 10, 10), (9, 8, 2, 1)
    assert balanced(even, 2) == ()
    assert balanced(even, 2, (3, 2, 1, 0)) == (3, 2, 1, 0), "as they are"
    assert balanced(skewed, 2) == (0, 3, 1, 2)
    assert balanced(skewed, 2, (1, 2, 0, 3)) == (1, 2, 0, 3)
    assert balanced((10, 1, 1, 10), 2, (0, 3, 1, 2)) == (), "the order of their numbers is told as none"
    near = (100, 97, 100, 97)
    assert imbalance(near, (), 2) < imbalance(near, packed(near, 2), 2) / (1.0 - GAIN)
    assert balanced(near, 2) == ()


def test_loads_of_nobody_are_even() -> None:
    assert imbalance((0, 0), (), 2) == 1.0
    assert balanced((0, 0, 0, 0), 2) == ()


@given(st.permutations(range(6)), st.integers(0, 5), st.integers(0, 6))
def test_boxes_hold_the_experts_of_the_rows(order: list[int], first: int, count: int) -> None:
    count = min(count, 6 - first)
    rows = Box((first, 1), (count, 4))
    boxes = boxes_in_order(rows, order)
    assert [box.offset[0] + at for box in boxes for at in range(box.size[0])] == order[first : first + count]
    assert sum(box.numel for box in boxes) == rows.numel
    for place in range(first, first + count):
        assert not uncovered(Box((order[place], 1), (1, 4)), boxes)
        assert places_of(tuple(order))[order[place]] == place
    assert boxes_in_order(rows, ()) == (rows,)


def test_an_order_says_where_experts_are_and_nothing_else() -> None:
    plain = Layout(dp=2, ep=2)
    placed = Layout(dp=2, ep=2, expert_order=((), (1, 0)))
    assert placed == plain
    assert hash(placed) == hash(plain)
    assert str(placed) == str(plain)
    assert [placed.experts_of(layer) for layer in (0, 1, 2, None)] == [(), (1, 0), (), ()]
    assert "expert_order" not in placed.to_dict()
    assert Layout.from_dict(placed.to_dict()).expert_order == ()
