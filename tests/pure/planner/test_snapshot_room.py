"""Room for slots, planned: what a worker writes, a node's loss included, and no more."""

from __future__ import annotations

from itertools import combinations

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.snapshot_shares import WHOLE_BYTES, fewest_replicas, flushed_shares
from picotron_ray.planner.snapshot_room import slot_budget, slot_estimate

JOB = load_job("smollm-1.7b", ["data.path=/corpus", "cluster.min_workers=1"])
WHOLE = slot_estimate(JOB, Layout())


def times(layout: Layout, *sizes: int) -> float:
    return WHOLE / slot_estimate(JOB, layout, sizes)


def test_any_replicas_that_are_no_neighbours_may_die_in_a_flush() -> None:
    """Of a small state one survivor is enough; never is a share without its writer and the one before."""
    for count in range(1, 7):
        for lost in range(count):
            shares = [flushed_shares(i, count, WHOLE_BYTES + 1) for i in range(count) if i != lost]
            assert count == 1 or {share for held in shares for share in held} == set(range(count))
            small = flushed_shares(lost, count, WHOLE_BYTES)
            assert (small[0], sorted(small)) == (lost, list(range(count)))
        for pair in combinations(range(count), 2):
            left = {s for i in range(count) if i not in pair for s in flushed_shares(i, count, 1 << 40)}
            apart = min((pair[0] - pair[1]) % count, (pair[1] - pair[0]) % count) > 1
            assert (len(left) == count) is apart


def test_replicas_of_a_node_share_and_the_loneliest_counts() -> None:
    assert fewest_replicas(Layout(dp=9), (8, 1)) == 1
    assert fewest_replicas(Layout(dp=8, zero=1), (8,)) == 1
    assert fewest_replicas(Layout(dp=8, zero=1, replicate=4), (4, 4)) == 2
    assert times(Layout(dp=8)) == pytest.approx(4, rel=0.01), "its share and the next one's, of 8"
    assert times(Layout(dp=16), 8, 8) == pytest.approx(4, rel=0.01)
    assert times(Layout(dp=9), 8, 1) == 1
    assert times(Layout(dp=8, zero=1)) == pytest.approx(8, rel=0.02)
    assert times(Layout(dp=2, tp=4)) == pytest.approx(4, rel=0.01)


def test_weights_and_two_moments_of_every_parameter_are_kept() -> None:
    assert pytest.approx(12 * 1.711e9, rel=0.03) == WHOLE
    light = load_job("smollm-1.7b", ["data.path=/corpus", "optimizer.moments=8bit"])
    assert slot_estimate(light, Layout()) == pytest.approx((4 + 2 * (1 + 4 / 256)) * 1.711e9, rel=0.03)
    away = load_job("smollm-1.7b", ["data.path=/corpus", "optimizer.offload=true"])
    assert slot_estimate(away, Layout()) == WHOLE, "offloaded moments are kept too"


def test_a_slot_is_budgeted_for_a_nodes_loss() -> None:
    asked: list[tuple[int, ...]] = []

    def choose(workers: int, sizes: tuple[int, ...]) -> Layout:
        asked.append(sizes)
        if len(sizes) > 1 or workers % 2:
            raise LayoutError("no")
        return Layout(dp=workers, zero=1)

    two = Layout(dp=16, zero=1)
    half = slot_estimate(JOB, Layout(dp=8, zero=1), (8,))
    assert slot_budget(JOB, two, (8, 8), choose) == half > 1.9 * slot_estimate(JOB, two, (8, 8))
    assert asked == [(8,)]
    assert slot_budget(JOB, Layout(dp=8), (8,), choose) == slot_estimate(JOB, Layout(dp=8)), "none fits on 7"
    assert asked[1:] == [(7,)]
    needy = JOB.model_copy(update={"cluster": JOB.cluster.model_copy(update={"min_workers": 16})})
    assert slot_budget(needy, two, (8, 8), choose) == slot_estimate(JOB, two, (8, 8)), "it waits then"
    assert len(asked) == 2
