"""Dimension along which ZeRO cuts a parameter: experts that do not divide are cut within them."""

from __future__ import annotations

import pytest

from picotron_ray.layout.layout import Layout
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.shard_boxes import local_box, zero_dim


def stack(experts: int, *shape: int, tp_dim: int | None = None) -> ParameterSpec:
    return ParameterSpec("up", (experts, *shape), 0, "block", tp_dim, True, 0.02, expert=True)


@pytest.mark.parametrize(
    ("spec", "layout", "dim"),
    [
        (stack(64, 96, 32, tp_dim=1), Layout(dp=64, zero=3), 0),
        (stack(8, 96, 32, tp_dim=1), Layout(dp=32, zero=3), 1),  # a quarter of an expert each
        (stack(8, 96, 32, tp_dim=1), Layout(dp=64, zero=1, ep=8), 1),
        (stack(8, 96, 32, tp_dim=1), Layout(dp=32, tp=2, zero=3), 2),  # 48 rows are left, 32 columns divide
        (stack(6, 90, 30), Layout(dp=4, zero=3), 0),  # nothing divides: padded, as FSDP does
        (stack(8, 96), Layout(dp=32, zero=3), 1),  # biases
        (stack(8, 96, 32), Layout(dp=32), 0),
        (stack(8, 96, 32), Layout(dp=32, zero=3, replicate=4), 0),
        (ParameterSpec("q", (8, 64), 0, "block", 0, True, 0.02), Layout(dp=32, zero=3), 0),
    ],
)
def test_experts_that_do_not_divide_are_cut_within_them(
    spec: ParameterSpec, layout: Layout, dim: int
) -> None:
    assert zero_dim(spec, layout) == dim


def test_every_rank_of_many_holds_as_much_of_few_experts() -> None:
    """Along dimension 0 one rank of four would have one of 8 experts, and three nothing."""
    spec, layout = stack(8, 96, 32, tp_dim=1), Layout(dp=32, ep=2, zero=3)
    boxes = [local_box(spec, layout, rank) for rank in range(layout.world_size)]
    assert {box.numel for box in boxes} == {8 * 96 * 32 // 32}
    assert len(set(boxes)) == len(boxes)
