"""Exact reducers give the sum, the same bits on every rank, and count what they send."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from picotron_ray.comm.reducers import mesh_bounds
from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.comm.reducers.point_to_point import mesh_
from picotron_ray.comm.wire_bytes import ring_share
from tests.support.gloo.parallel_jobs.reducer_jobs import broadcasts, counted, sums
from tests.support.gloo.pool import Pool

SIZES = [1, 3, 1000, 4097]
PLANS = [
    ReductionPlan(),
    ReductionPlan("reduce-scatter"),
    ReductionPlan("bucketed", "ring", chunk_bytes=1024),
    ReductionPlan("bucketed", "tree", chunk_bytes=1024),
    ReductionPlan("bucketed", "mesh", chunk_bytes=1024),
    ReductionPlan("hierarchical", inner=2, chunk_bytes=1024),
    ReductionPlan("hierarchical", "tree", inner=2),
    ReductionPlan("hierarchical", "mesh", inner=2),
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm_gives_the_sum(pool: Pool, ranks: int) -> None:
    plans = [plan for plan in PLANS if ranks % plan.inner == 0]
    per_rank = pool.run(ranks, sums, plans, SIZES)
    assert all(far < 1e-14 for found in per_rank for far, _, _ in found)
    for same in zip(*per_rank, strict=True):
        assert len({bits for _, bits, _ in same}) == 1, "ranks must not drift apart"
    sent = [sum(found[place][2] for found in per_rank) for place in range(len(per_rank[0]))]
    whole = 8 * SIZES[-1]
    by_plan = dict(zip(plans, sent[len(SIZES) - 1 :: len(SIZES)], strict=True))
    for plan in (ReductionPlan(), PLANS[2]):
        assert by_plan[plan] == pytest.approx(2 * (ranks - 1) * whole, rel=1e-3)
    assert by_plan[PLANS[3]] == 2 * (ranks - 1) * whole
    assert by_plan[PLANS[4]] == ranks * (ranks - 1) * whole


def test_two_levels_send_less_across(pool: Pool) -> None:
    """With neighbourhoods of 2, each rank sends half of the buffer across instead of 3/4 of it twice."""
    flat, two = (pool.run(4, sums, [plan], [4096]) for plan in (PLANS[2], PLANS[5]))
    assert sum(found[0][2] for found in two) == 4 * 8 * (2 * 2048 + 2 * 1024)
    assert sum(found[0][2] for found in flat) == 4 * 8 * 2 * 3 * 1024


def test_the_first_rank_s_values_reach_all(pool: Pool) -> None:
    assert pool.run(4, broadcasts, 2) == [[7.0] * 5] * 4


def test_what_is_counted_is_what_the_kernel_sends(pool: Pool) -> None:
    """gloo adds headers, and barriers: less than 64 KiB on 8 MiB."""
    own = [ReductionPlan("bucketed", name) for name in ("ring", "tree", "mesh")]
    plans = [*PLANS[:2], *own, ReductionPlan("int8"), ReductionPlan("topk", ratio=0.1), ReductionPlan("bf16")]
    for found in pool.run(2, counted, plans, 2**21):
        for plan, (mine, kernel) in zip(plans, found, strict=True):
            assert mine <= kernel < mine + 65536, plan
    assert ring_share(2**23, 2) == 2**22


class Threads:
    """Peers that are threads of this process, and the largest message between them."""

    def __init__(self, index: int, boxes: list[list[queue.SimpleQueue[torch.Tensor]]]) -> None:
        self.index, self.count, self._boxes = index, len(boxes), boxes
        self.largest = 0

    def swap(
        self, outgoing: list[tuple[int, torch.Tensor]], incoming: list[tuple[int, torch.Tensor]]
    ) -> None:
        for peer, tensor in outgoing:
            self.largest = max(self.largest, tensor.numel())
            self._boxes[self.index][peer].put(tensor.clone())
        for peer, tensor in incoming:
            tensor.copy_(self._boxes[peer][self.index].get(timeout=20))


def test_a_mesh_takes_the_room_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large sum it holds a piece of each peer's buffer at a time."""
    monkeypatch.setattr(mesh_bounds, "ROOM_BYTES", 5 * 3 * 8)
    boxes = [[queue.SimpleQueue[torch.Tensor]() for _ in range(3)] for _ in range(3)]
    peers = [Threads(index, boxes) for index in range(3)]
    flats = [torch.arange(17.0, dtype=torch.float64) * 10**index for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(mesh_, flats, peers))  # type: ignore[arg-type]
    assert [flat.tolist() for flat in flats] == [[111.0 * place for place in range(17)]] * 3
    assert {peer.largest for peer in peers} == {5}
