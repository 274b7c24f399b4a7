"""Boxes by hand: what two of them share, what one leaves of another, and what is copied between them."""

from __future__ import annotations

import numpy as np
import pytest

from picotron_ray.layout.shards import (
    Box,
    Shard,
    as_elements,
    copy_common,
    element_type,
    region,
    subtract,
    uncovered,
    whole,
)

SQUARE = Box((2, 3), (4, 5))  # rows 2 to 5, columns 3 to 7


@pytest.mark.parametrize(
    ("other", "common"),
    [
        (Box((0, 0), (3, 4)), Box((2, 3), (1, 1))),
        (Box((5, 7), (9, 9)), Box((5, 7), (1, 1))),
        (Box((3, 0), (2, 20)), Box((3, 3), (2, 5))),
        (Box((0, 0), (20, 20)), SQUARE),
        (Box((0, 3), (2, 5)), None),
        (Box((2, 8), (4, 5)), None),
        (Box((6, 3), (1, 1)), None),
        (Box((3, 4), (0, 2)), None),
    ],
    ids=str,
)
def test_what_two_boxes_share(other: Box, common: Box | None) -> None:
    assert SQUARE.intersect(other) == common
    assert other.intersect(SQUARE) == common


def test_sizes() -> None:
    assert (SQUARE.numel, Box((), ()).numel, Box((1,), (0,)).numel) == (20, 1, 0)
    assert whole((3, 4)) == Box((0, 0), (3, 4))
    assert whole(()) == Box((), ())
    widths = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
    for dtype, width in widths.items():
        assert Shard("a", dtype, (9, 9), SQUARE).nbytes == 20 * width
        assert element_type(dtype) == np.dtype(f"u{width}")


def test_what_a_hole_leaves() -> None:
    """Whole rows above and below, then the columns beside the hole."""
    assert subtract(SQUARE, Box((3, 4), (2, 2))) == [
        Box((2, 3), (1, 5)),
        Box((5, 3), (1, 5)),
        Box((3, 3), (2, 1)),
        Box((3, 6), (2, 2)),
    ]
    assert subtract(SQUARE, Box((0, 0), (3, 20))) == [Box((3, 3), (3, 5))]
    assert subtract(SQUARE, Box((5, 0), (3, 20))) == [Box((2, 3), (3, 5))]
    assert subtract(SQUARE, Box((6, 3), (1, 1))) == [SQUARE]
    assert subtract(SQUARE, SQUARE) == []


def test_what_no_cover_holds() -> None:
    assert uncovered(SQUARE, []) == [SQUARE]
    assert uncovered(Box((1,), (0,)), []) == []
    halves = [Box((2, 3), (2, 5)), Box((4, 3), (2, 5))]
    assert uncovered(SQUARE, halves) == []
    assert uncovered(SQUARE, halves[:1]) == halves[1:]
    assert uncovered(SQUARE, iter([SQUARE, Box((), ())])) == []  # no look at what comes after


def test_copies_of_what_two_boxes_share() -> None:
    source = np.arange(20, dtype=np.uint16).reshape(4, 5)
    shard = Shard("a", "bfloat16", (9, 9), SQUARE)
    assert as_elements(source.tobytes(), shard).tolist() == source.tolist()
    target_box = Box((4, 6), (3, 4))  # rows 4 and 5, columns 6 and 7 are common
    assert region(Box((4, 6), (2, 2)), SQUARE) == (slice(2, 4), slice(3, 5))
    target = np.full((3, 4), 99, dtype=np.uint16)
    assert copy_common(target, target_box, source, SQUARE) == 4
    assert target.tolist() == [[13, 14, 99, 99], [18, 19, 99, 99], [99, 99, 99, 99]]
    assert copy_common(target, Box((0, 0), (2, 3)), source, SQUARE) == 0
    assert target[2, 3] == 99
