"""Layout: rank order, state groups and rows, each against its definition for every small layout."""

from __future__ import annotations

import itertools

import pytest

from picotron_ray.layout.layout import Coordinates, Layout
from picotron_ray.models.parameters import SequenceShard

LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=pp, cp=cp, zero=zero)
    for dp, tp, pp, cp, zero in itertools.product((1, 2, 3), (1, 2), (1, 2, 3), (1, 2), (0, 3))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_and_coordinates_are_inverse(layout: Layout) -> None:
    seen = {layout.coordinates(rank) for rank in range(layout.world_size)}
    every = itertools.product(*(range(n) for n in (layout.pp, layout.dp, layout.cp, layout.tp)))
    assert seen == {Coordinates(*at) for at in every}
    assert all(layout.rank(layout.coordinates(rank)) == rank for rank in range(layout.world_size))


@pytest.mark.parametrize(("length", "parts"), [(8, 1), (8, 2), (24, 3), (32, 4)])
def test_a_row_is_shared_evenly(length: int, parts: int) -> None:
    """Every token once, in order on each rank, and as many (query, key) pairs for each."""
    shards = [SequenceShard(length, parts, index).positions() for index in range(parts)]
    assert sorted(itertools.chain(*shards)) == list(range(length))
    assert all(list(shard) == sorted(shard) for shard in shards)
    assert len({sum(position + 1 for position in shard) for shard in shards}) == 1


def test_tensor_parallel_ranks_are_neighbours() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    assert [layout.coordinates(rank).tp for rank in range(4)] == [0, 1, 0, 1]
    assert [layout.coordinates(rank).dp for rank in range(4)] == [0, 0, 1, 1]
    assert [layout.coordinates(rank).pp for rank in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_state_groups_cover_the_state_once(layout: Layout) -> None:
    groups = [layout.state_group(rank) for rank in range(layout.world_size)]
    assert set(groups) == set(range(layout.state_groups))
    for rank in range(layout.world_size):
        replicas = layout.state_replicas(rank)
        assert rank in replicas
        assert replicas == tuple(sorted(replicas))
        stages = {(layout.coordinates(r).pp, layout.coordinates(r).tp) for r in replicas}
        assert len(stages) == 1
        assert len(replicas) == (layout.replicate if layout.zero else layout.dp * layout.cp)


def test_where_the_ends_of_a_pipeline_lie() -> None:
    for layout, ends in (
        (Layout(), (0, 0)),
        (Layout(pp=3), (0, 2)),
        (Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2), (0, 1)),
        (Layout(pp=2, schedule="dualpipev", virtual_stages=2), (0, 0)),
        (Layout(pp=3, schedule="custom", placement=((2,), (0,), (1,))), (1, 0)),
    ):
        assert (layout.first_stage_rank, layout.last_stage_rank) == ends
        others = {} if len(set(ends)) == 1 else {ends[0]: ends[1], ends[1]: ends[0]}
        assert [layout.other_end(rank) for rank in range(3)] == [others.get(rank) for rank in range(3)]
        for rank, stage in zip(ends, (0, layout.stages - 1), strict=True):
            assert stage in layout.rank_stages(rank)


def test_copies_of_a_cut_state_lie_apart() -> None:
    """Neighbours share a copy, so that a node which is lost takes no part that others have not."""
    layout = Layout(dp=4, tp=2, zero=3, replicate=2)
    assert [layout.shard(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.state_replicas(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("dp", range(1, 9))
@pytest.mark.parametrize("batch", [1, 7, 8, 32])
def test_rows_split_the_batch_and_fit_the_micro_batches(dp: int, batch: int) -> None:
    for micro_batch in (1, 2, 3, 5):
        layout = Layout(dp=dp, micro_batch=micro_batch)
        parts = [layout.rows(index, batch) for index in range(dp)]
        assert parts[0][0] == 0
        assert parts[-1][1] == batch
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        sizes = [last - first for first, last in parts]
        assert max(sizes) - min(sizes) <= 1
        room = layout.micro_batches(batch) * micro_batch
        assert max(sizes) <= room < max(sizes) + micro_batch


def test_round_trip_and_text() -> None:
    layout = Layout(dp=2, tp=2, pp=2, cp=2, zero=3, schedule="gpipe", micro_batch=4)
    assert Layout.from_dict(layout.to_dict()) == layout
    assert str(layout) == "dp2-tp2-pp2-cp2-zero3-gpipe-mb4"
    assert str(Layout()) == "dp1-tp1-pp1-mb1"
