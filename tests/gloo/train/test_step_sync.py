"""What all ranks agree on at the end of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from picotron_ray.layout.layout import Layout
from picotron_ray.train.state_copies import HostCopies
from picotron_ray.train.step_sync import SNAPSHOT, STOP, Agreement, Contribution, agree, exchange
from picotron_ray.train.way_selection import NO_COSTS, Cost
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU

WIDE = Layout(dp=2, cp=2, tp=2, pp=2)
ONE = Contribution(1.5, 2.5, (0, 4), STOP, b"0123456789abcdef", 6.0, 2.0, 7, 1.25, 9)


def contributions() -> list[Contribution]:
    """Of 16 ranks, in the order stage, dp, cp, tp."""
    return [
        replace(
            ONE,
            loss_sum=float(rank),
            grad_norm=rank + 0.5,
            rows=((0, 3), (3, 7))[rank // 4 % 2],
            digest=bytes([rank // 4 % 2] * 16),
            flags={3: STOP, 5: SNAPSHOT}.get(rank, 0),
            snapshots_apart_s=rank / 2,
            step_time_s=(16 - rank) / 8,
            sealed=20 - rank,
            imbalance=rank % 7,
            dropped=rank + 1,
        )
        for rank in range(16)
    ]


def agreed(records: list[Contribution], layout: Layout) -> Agreement:
    return agree(np.concatenate([one.record for one in records]), layout)


def test_numbers_of_all_ranks_become_one() -> None:
    """Losses are added, the slowest rank counts, and each stage's assignments once."""
    assert agreed(contributions(), WIDE) == Agreement(
        loss_sum=120.0,
        grad_norm=0.5,
        rows=((0, 3, "00" * 16), (3, 7, "01" * 16)),
        flags=STOP + SNAPSHOT,
        sealed=5,
        snapshot_interval=4,  # 3.75 s of copying beside steps of 2 s, half of which it may take
        imbalance=6,
        dropped=1 + 9,
    )


@pytest.mark.parametrize(
    ("cost", "step", "interval"),
    [(0.0, 1.0, 1), (0.5, 1.0, 1), (0.51, 1.0, 2), (1.0, 1.0, 2), (1.01, 1.0, 3), (3.0, 0.0, 1)],
)
def test_a_snapshot_costs_half_of_the_time_at_most(cost: float, step: float, interval: int) -> None:
    found = agreed([replace(ONE, snapshots_apart_s=HostCopies().apart_s(cost), step_time_s=step)], Layout())
    assert found.snapshot_interval == interval


def test_a_replica_that_fed_something_else_is_told() -> None:
    records = contributions()
    records[6] = replace(records[6], rows=(3, 8))
    with pytest.raises(RuntimeError) as caught:
        agreed(records, WIDE)
    digest = "01" * 16
    assert str(caught.value) == f"rank 6 fed tokens (3, 8, '{digest}'), its replica fed (3, 7, '{digest}')"


def test_a_rank_alone_agrees_with_itself() -> None:
    assert exchange(ONE, Layout(), CPU) == Agreement(
        1.5, 2.5, ((0, 4, ONE.digest.hex()),), STOP, 7, 3, imbalance=1.25, dropped=9, costs=NO_COSTS
    )
    timed = [replace(ONE, costs=(Cost(*cost), *NO_COSTS[1:])) for cost in ((8, 0.25), (4, 0.5))]
    assert agreed(timed, Layout(tp=2)).costs == (Cost(8, 0.5), *NO_COSTS[1:]), "the largest of each"
    assert agreed([Contribution(1.0, 2.0)], Layout()).flags == 0
    assert STOP & SNAPSHOT == 0
