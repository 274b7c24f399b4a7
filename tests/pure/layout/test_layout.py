"""A layout by hand: where ranks stand, what each of them holds, and the name of it all."""

from __future__ import annotations

from typing import get_args

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Coordinates, Layout, Zero, current_names
from picotron_ray.layout.schedule_rows import PipelineShape


def test_places_of_uneven_degrees() -> None:
    """Rank 47 of 60: 47 = ((1·3 + 1)·5 + 3)·2 + 1."""
    layout = Layout(dp=3, tp=2, pp=2, cp=5)
    assert layout.world_size == 60
    assert layout.coordinates(47) == Coordinates(pp=1, dp=1, cp=3, tp=1)
    assert layout.rank(Coordinates(pp=1, dp=1, cp=3, tp=1)) == 47
    assert (layout.replicas, layout.replica(47), layout.replica(59)) == (15, 8, 14)


def test_state_without_zero_is_cut_over_stages_experts_and_tensors() -> None:
    layout = Layout(dp=4, tp=2, pp=2, ep=2)
    assert (layout.shards, layout.expert_shards, layout.state_groups) == (1, 1, 8)
    assert [layout.expert_index(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.expert_replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.state_group(rank) for rank in range(16)] == [
        0,
        1,
        2,
        3,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        4,
        5,
        6,
        7,
    ]
    assert layout.state_replicas(15) == (11, 15)
    dense = Layout(dp=2, tp=2)
    assert [dense.expert_index(rank) for rank in range(4)] == [0] * 4
    assert [dense.expert_replica(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_zero_cuts_what_expert_parallelism_left() -> None:
    layout = Layout(dp=8, zero=1, ep=2)
    assert (layout.shards, layout.expert_shards, layout.state_groups) == (8, 4, 8)
    assert [layout.expert_index(rank) for rank in range(8)] == [0, 1] * 4
    assert [layout.expert_shard(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.state_group(rank) for rank in range(8)] == list(range(8))
    copied = Layout(dp=3, tp=2, pp=2, cp=5, zero=2, replicate=3)
    assert (copied.shards, copied.expert_shards, copied.state_groups) == (5, 5, 20)
    assert (copied.shard(47), copied.state_group(47)) == (3, 17)
    assert copied.state_replicas(47) == (37, 47, 57)
    assert Layout(dp=4, zero=1, replicate=2, ep=4).expert_shards == 1


@pytest.mark.parametrize(
    ("layout", "stages", "hops"),
    [
        (Layout(), [(0,)], 0),
        (Layout(pp=3), [(0,), (1,), (2,)], 1),
        (Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=3), [(0, 2, 4), (1, 3, 5)], 3),
        (Layout(pp=3, schedule="zbv", virtual_stages=2), [(0, 5), (1, 4), (2, 3)], 2),
        (
            Layout(pp=2, schedule="custom", virtual_stages=3, placement=((1, 2, 5), (0, 3, 4))),
            [(1, 2, 5), (0, 3, 4)],
            2,
        ),
        (
            Layout(pp=2, schedule="custom", virtual_stages=3, placement=((0, 4, 5), (1, 2, 3))),
            [(0, 4, 5), (1, 2, 3)],
            1,
        ),
    ],
    ids=str,
)
def test_stages_of_ranks_and_their_hops(layout: Layout, stages: list[tuple[int, ...]], hops: int) -> None:
    """A stage hops where the next one is on another rank; the last stage never does."""
    assert layout.stages == sum(map(len, stages))
    assert [layout.rank_stages(rank) for rank in range(layout.pp)] == stages
    assert layout.hops == hops


@pytest.mark.parametrize(
    ("layout", "first", "last"),
    [
        (Layout(), 0, 0),
        (Layout(pp=3), 0, 2),
        (Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2), 0, 1),
        (Layout(pp=3, schedule="zbv", virtual_stages=2), 0, 0),
        (Layout(pp=3, schedule="custom", placement=((1,), (2,), (0,))), 2, 1),
        (Layout(pp=3, schedule="custom", virtual_stages=2, placement=((1, 2), (0, 3), (4, 5))), 1, 2),
        (Layout(pp=2, schedule="custom", virtual_stages=2, placement=((1, 2), (0, 3))), 1, 1),
    ],
    ids=str,
)
def test_both_ends_of_the_pipeline(layout: Layout, first: int, last: int) -> None:
    assert (layout.first_stage_rank, layout.last_stage_rank) == (first, last)
    ends = {} if first == last else {first: last, last: first}
    assert [layout.other_end(rank) for rank in range(layout.pp)] == [ends.get(r) for r in range(layout.pp)]


def test_zero_has_four_levels() -> None:
    for zero in get_args(Zero):
        assert parse_job({"layout": {"dp": 2, "zero": zero}}).layout.zero == Layout(dp=2, zero=zero).zero
    assert get_args(Zero) == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"^layout\.zero: saw 4"):
        parse_job({"layout": {"zero": 4}})


def test_rows_and_micro_batches() -> None:
    layout = Layout(dp=3, micro_batch=2)
    assert [layout.rows(index, 8) for index in range(3)] == [(0, 3), (3, 6), (6, 8)]
    assert [layout.micro_batches(batch) for batch in (1, 6, 7, 12, 13, 18, 19)] == [1, 1, 2, 2, 3, 3, 4]
    piped = Layout(dp=3, pp=4, virtual_stages=2, schedule="looped-bfs", micro_batch=2)
    assert piped.pipeline_shape(13) == PipelineShape(ranks=4, stages_per_rank=2, micro_batches=3)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(virtual_stages=2, context="all-gather", replicate=2), "dp1-tp1-pp1-mb1"),
        (Layout(cp=2, context="all-gather", micro_batch=3), "dp1-tp1-pp1-cp2-gather-mb3"),
        (Layout(dp=4, ep=2, zero=1), "dp4-tp1-pp1-ep2-zero1-mb1"),
        (Layout(dp=4, zero=3, replicate=2), "dp4-tp1-pp1-zero3-hsdp2-mb1"),
        (Layout(pp=2, schedule="zbv", virtual_stages=2), "dp1-tp1-pp2-zbv-v2-mb1"),
        (Layout(pp=2, recompute="every-2", offload_activations=True), "dp1-tp1-pp2-1f1b-mb1-every-2-offload"),
    ],
    ids=str,
)
def test_a_name_says_what_differs_from_the_plain_layout(layout: Layout, name: str) -> None:
    assert str(layout) == name
    assert Layout.from_dict(layout.to_dict()) == layout


def test_a_stored_layout_of_an_earlier_version_has_no_placement() -> None:
    stored = Layout(pp=2, dp=3).to_dict()
    del stored["placement"]
    assert Layout.from_dict(stored) == Layout(pp=2, dp=3)
    placed = Layout(pp=2, schedule="custom", placement=((1,), (0,)))
    assert Layout.from_dict({**placed.to_dict(), "placement": [[1], [0]]}) == placed


def test_former_names_in_a_text_are_replaced_in_layouts_alone() -> None:
    text = "afab: dp2-tp1-pp2-afab-mb4 beside dp4-tp1-pp1-mb1 and dp1-tp1-pp2-afab-v2-mb1"
    assert (
        current_names(text)
        == "afab: dp2-tp1-pp2-gpipe-mb4 beside dp4-tp1-pp1-mb1 and dp1-tp1-pp2-gpipe-v2-mb1"
    )
