"""Own algorithms of gathers, sums and exchanges do what the backend does, and count what they send."""

from __future__ import annotations

import pytest
import torch

from picotron_ray.comm.collectives.collectives import CollectivePlan
from tests.support.gloo.parallel_jobs.reducer_jobs import collected
from tests.support.gloo.pool import Pool

PLANS = [
    CollectivePlan(),
    CollectivePlan("ring", chunk_bytes=1024),
    CollectivePlan("mesh", chunk_bytes=1024),
    CollectivePlan("pairwise"),
    CollectivePlan("hierarchical", inner=2, chunk_bytes=1024),
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm_gathers_sums_and_exchanges(pool: Pool, ranks: int) -> None:
    per_rank = pool.run(ranks, collected, PLANS, torch.float64)
    for found in per_rank:
        for gathered, scattered, summed, arrived, _, sent in found:
            assert gathered == 0
            assert scattered < 1e-14
            assert summed < 1e-14
            assert arrived
            assert sent == 8 * 1000 * (ranks - 1)
    for same in zip(*per_rank, strict=True):
        assert len({bits for *_, bits, _ in same}) == 1, "ranks must not drift apart"


def test_two_levels_of_unequal_sizes(pool: Pool) -> None:
    """Six ranks in neighbourhoods of two, and of three."""
    plans = [CollectivePlan("hierarchical", inner=inner) for inner in (2, 3)]
    for found in pool.run(6, collected, plans, torch.float64):
        assert all(a == 0 and b < 1e-14 and c < 1e-14 and same for a, b, c, same, _, _ in found)
