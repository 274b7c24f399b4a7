"""Planned slots beside those that ranks would make, of the same layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from picotron_ray.bench.initial_weights import boxes_of
from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Shard
from picotron_ray.parallel.shard_boxes import is_primary
from picotron_ray.planner.snapshot_room import slot_estimate
from picotron_ray.train.snapshot import SnapshotWriter, flush_bytes


class Nothing:
    """In a tensor's place, where only its rows are taken."""

    def __getitem__(self, rows: slice) -> Nothing:
        return self


def state(job: JobConfig, layout: Layout, rank: int) -> Iterator[StateTensor]:
    live: Any = Nothing()
    for spec, box in boxes_of(job, layout, rank):
        for name in (spec.name, f"exp_avg/{spec.name}", f"exp_avg_sq/{spec.name}"):
            yield StateTensor(Shard(name, "float32", spec.shape, box), live, is_primary(spec, layout, rank))


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(dp=8), (8,)),
        (Layout(dp=8), (5, 3)),
        (Layout(dp=8, zero=1), (8,)),
        (Layout(dp=4, zero=3, replicate=2, tp=2), (8,)),
        (Layout(dp=2, tp=2, pp=2), (4, 4)),
    ],
    ids=str,
)
def test_a_planned_slot_holds_what_every_rank_writes_and_little_more(
    layout: Layout, sizes: tuple[int, ...]
) -> None:
    job = load_job("smollm-135m", ["data.path=/corpus"])
    nodes = [str(node) for node, size in enumerate(sizes) for _ in range(size)]
    found = []
    for rank in range(layout.world_size):
        writer = SnapshotWriter.of((1, 1), rank, layout, nodes, 8)
        found.append(flush_bytes(list(state(job, layout, rank)), writer.index, writer.count))
    planned = slot_estimate(job, layout, sizes)
    print(f"planned {planned / 1e6:.1f} MB, largest {max(found) / 1e6:.1f} MB")
    assert max(found) <= planned < 1.15 * max(found) + (1 << 19)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(dp=4), Layout(pp=2)], ids=str)
def test_a_tiny_models_slots_ask_for_little_more_than_they_take(layout: Layout) -> None:
    """Its state is smaller than what a slot holds besides."""
    job = load_job("tiny", [])
    largest = 0
    for rank in range(layout.world_size):
        writer = SnapshotWriter.of((1, 1), rank, layout, ["a"] * layout.world_size, 8)
        largest = max(largest, flush_bytes(list(state(job, layout, rank)), writer.index, writer.count))
    planned = slot_estimate(job, layout, (layout.world_size,))
    assert largest <= planned < 1.6 * largest
