"""Which rank is wrong, where several hold the same and differ."""

from __future__ import annotations

import math

import pytest

from picotron_ray.debug.replicas import (
    LARGEST,
    MOST_ELEMENTS,
    DifferingValues,
    RankValues,
    differing_keys,
    differing_values,
    first_difference,
    first_part,
    judge_replay,
    outvoted,
)


def values(*held: float, step: int = 7) -> DifferingValues:
    return DifferingValues(step, "w", (3,), tuple(RankValues(r, (v,)) for r, v in enumerate(held)))


def test_only_ranks_with_the_same_key_are_compared() -> None:
    assert differing_keys([{1: 5}, {2: 6}, {}]) == frozenset()
    assert differing_keys([{1: 5, 2: 6}, {1: 5, 2: 7}, {2: 6}]) == {2}


def test_the_first_tensor_in_the_order_of_the_model_is_named() -> None:
    same = {"z": 1, "a": 2}
    assert first_difference([same, same]) is None
    assert first_difference([same, {"z": 9, "a": 9}]) == "z"
    assert first_difference([{"other": 1}, same, {"z": 1, "a": 3}]) == "a"


def test_parts_of_ranks_that_hold_none_are_left_out() -> None:
    assert first_part([None, [1, 2], [1, 2]]) is None
    assert first_part([None, [1, 2], [1, 3]]) == 1


def test_elements_that_differ_come_with_values_and_bits() -> None:
    one, other = [(0b1000, 1.0), (0b1100, 2.0)], [(0b1000, 1.0), (0b0101, 9.0)]
    found = differing_values(7, "w", 64, [one, None, other])
    assert found is not None
    assert (found.elements, found.bits) == ((65,), 2)
    assert found.ranks == (RankValues(0, (2.0,)), RankValues(2, (9.0,)))
    assert str(found) == "w in 1 element, the first of them 65 (rank 0: 2, rank 2: 9; 2 bits of it differ)"
    assert differing_values(7, "w", 0, [one, one]) is None


def test_few_of_many_elements_are_kept_and_what_json_lacks_is_replaced() -> None:
    many = [[(n, float(n)) for n in range(100)], [(n + 1000, math.nan) for n in range(100)]]
    found = differing_values(7, "w", 0, many)
    assert found is not None
    assert len(found.elements) == MOST_ELEMENTS
    assert found.ranks[1].values == (LARGEST,) * MOST_ELEMENTS
    assert "in 16 elements or more" in str(found)


@pytest.mark.parametrize(
    ("held", "liars"),
    [
        ((1.0, 2.0, 1.0), (1,)),
        ((2.0, 1.0, 1.0, 1.0), (0,)),
        ((1.0, 2.0, 3.0, 1.0, 1.0), (1, 2)),
        ((1.0, 2.0), ()),
        ((1.0, 1.0, 2.0, 2.0), ()),
        ((1.0, 2.0, 3.0), ()),
    ],
)
def test_a_minority_is_outvoted(held: tuple[float, ...], liars: tuple[int, ...]) -> None:
    assert outvoted(values(*held)) == liars


@pytest.mark.parametrize(
    ("held", "again", "liars"),
    [
        ((1.0, 3.0), (1.0, 1.0), (1,)),
        ((3.0, 1.0), (1.0, 1.0), (0,)),
        ((1.001, 3.0), (1.0, 1.0), (1,)),  # the sound one was moved by wrong gradients
        ((1.5, 3.0), (1.0, 1.0), ()),  # 4 times as far, which is not more than that
        ((1.5, 3.1), (1.0, 1.0), (1,)),
        ((1.0, LARGEST), (1.0, 1.0), (1,)),
        ((-LARGEST, LARGEST), (1.0, 1.0), ()),
        ((1.0, 3.0), (1.0, 3.0), ()),  # it repeats itself
        ((1.0, 3.0), (1.0, 2.0), (1,)),  # rank 1 does not even repeat its own
    ],
)
def test_a_replay_names_whoever_was_far_off(
    held: tuple[float, ...], again: tuple[float, ...], liars: tuple[int, ...]
) -> None:
    found, why = judge_replay(values(*held), {rank: [value] for rank, value in enumerate(again)})
    assert found == liars, why
    assert why


def test_a_rank_that_is_gone_leaves_it_undecided() -> None:
    found, why = judge_replay(values(1.0, 3.0), {0: [1.0]})
    assert found == ()
    assert why == "not all of the ranks that differed have computed it again"
