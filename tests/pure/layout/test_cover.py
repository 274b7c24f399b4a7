"""Cover checks of many boxes: the answers of the quadratic ones, on layouts drawn at random, in n log n."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable

import pytest

from picotron_ray.layout.cover import groups, missing, needed
from picotron_ray.layout.shards import Box, uncovered, whole

Cut = tuple[tuple[int, ...], list[Box]]


def pieces(length: int, parts: int, rng: random.Random) -> list[tuple[int, int]]:
    cuts = sorted({0, length, *(rng.randrange(length) for _ in range(parts - 1))})
    return list(itertools.pairwise(cuts))


def grid(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    boxes = [Box((), ())]
    for length in shape:
        spans = pieces(length, rng.randint(1, 6), rng)
        boxes = [Box((*b.offset, lo), (*b.size, hi - lo)) for b in boxes for lo, hi in spans]
    return boxes


def drawn(seed: int) -> Cut:
    """Several grids of one tensor, of which nodes hold parts, some twice; at times with a box of any kind."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 3)))
    boxes = [box for _ in range(rng.randint(1, 3)) for box in grid(shape, rng)]
    boxes += rng.sample(boxes, len(boxes) // 3)
    for _ in range(rng.choice([0, 0, 3])):
        offset = tuple(rng.randrange(length) for length in shape)
        size = tuple(rng.randint(0, length - at) for at, length in zip(offset, shape, strict=True))
        boxes.append(Box(offset, size))
    rng.shuffle(boxes)
    return shape, boxes[: rng.choice([len(boxes), len(boxes) * 2 // 3])]


def pairwise(boxes: list[Box]) -> list[int]:
    """The definition: largest first, what those before it do not cover."""
    held: list[Box] = []
    found = []
    for index in sorted(range(len(boxes)), key=lambda index: -boxes[index].numel):
        if uncovered(boxes[index], held):
            held.append(boxes[index])
            found.append(index)
    return sorted(found)


def elements(boxes: Iterable[Box]) -> int:
    return sum(box.numel for box in boxes)


@pytest.mark.parametrize("seeds", [range(at, at + 100) for at in range(0, 500, 100)], ids=str)
def test_answers_are_those_of_the_pairwise_check(seeds: range) -> None:
    whole_ones = 0
    for seed in seeds:
        shape, boxes = drawn(seed)
        assert needed(boxes) == pairwise(boxes), seed
        there, before = missing(whole(shape), boxes), uncovered(whole(shape), boxes)
        assert (not there) == (not before), seed
        assert elements(there) == elements(before), seed
        in_order = sorted(boxes, key=lambda box: box.offset)
        if there:
            assert there == uncovered(whole(shape), in_order), seed
        whole_ones += not there
    assert 10 < whole_ones < 90


def test_groups_have_nothing_in_common() -> None:
    for seed in range(200):
        _, boxes = drawn(seed)
        found = list(groups(boxes))
        assert sorted(index for group in found for index in group) == list(range(len(boxes)))
        for group in found:
            others = [i for i in range(len(boxes)) if i not in group]
            assert not any(boxes[a].intersect(boxes[b]) for a in group for b in others), seed


def test_a_grid_ends_as_its_places() -> None:
    rng = random.Random(3)
    places = grid((40, 30, 20), rng)
    assert all(len(group) == 2 for group in groups(places * 2))
    windmill = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert [sorted(group) for group in groups(windmill)] == [[0, 1, 2, 3]]
    assert missing(whole((3, 3)), windmill) == [Box((1, 1), (1, 1))]


def test_nothing_and_what_lies_outside() -> None:
    assert list(groups([])) == needed([]) == missing(Box((0,), (0,)), []) == []
    assert missing(Box((), ()), []) == [Box((), ())]
    assert missing(Box((2,), (4,)), [Box((0,), (3,)), Box((5,), (9,)), Box((20,), (4,))]) == [Box((3,), (2,))]


def shuffled(rows: int) -> list[Box]:
    boxes = [Box((row, 0), (1, 8)) for row in range(rows)] * 2
    random.Random(rows).shuffle(boxes)
    return boxes


def test_eight_times_the_boxes_take_less_than_sixteen_times_as_long() -> None:
    def cpu_s(rows: int) -> float:
        boxes, times = shuffled(rows), []
        for _ in range(3):
            began = time.process_time()
            assert len(needed(boxes)) == rows
            assert missing(whole((rows, 8)), boxes) == []
            times.append(time.process_time() - began)
        return min(times)

    assert cpu_s(8 * 1500) < 16 * cpu_s(1500)
