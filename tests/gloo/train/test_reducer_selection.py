"""The choice of a reducer: whose turn it is, decisions at most every 100 steps, one for all ranks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.comm.reducers.selector import EVERY_STEPS
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.reducer_selection import ReducerSelection
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job, run_layout
from tests.support.gloo.parallel_jobs.reducer_jobs import selected
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Pool

SIZES = (1_000_000, 4_000_000)
FOUR = Layout(dp=4, micro_batch=1)


def name_of(plan: ReductionPlan) -> str:
    return plan.topology if plan.topology != "auto" else plan.gradients


def made(rank: int, nodes: tuple[str, ...] = ("a", "a", "b", "b")) -> ReducerSelection:
    mesh: Any = SimpleNamespace(layout=FOUR, rank=rank, nodes=nodes)
    return ReducerSelection(ReductionPlan(), 2, mesh)


def seconds(name: str, nbytes: int, across_bytes_s: float) -> float:
    """Two levels send a quarter across; flat ways three quarters, over a link that is the bottleneck."""
    share = {"hierarchical": 0.25, "mesh": 1.5}.get(name, 0.75)
    latency = {"overlapped": 1e-3, "hierarchical": 4e-3, "tree": 2e-3}.get(name, 3e-3)
    return latency + share * nbytes / across_bytes_s


def drive(steps: int, link_at: Any) -> tuple[list[str], list[int]]:
    """What was used at each step, and the steps at which there was a decision; four ranks in step."""
    ranks = [made(rank) for rank in range(4)]
    used, decided = [], []
    for step in range(1, steps + 1):
        names = {name_of(selection.begin(step)) for selection in ranks}
        assert len(names) == 1, "all ranks sum alike"
        used.append(names.pop())
        for rank, selection in enumerate(ranks):  # the last is the slowest; the first of a tree is done early
            slower = 0.1 if used[-1] == "tree" and rank == 0 else 1 + 0.3 * rank
            selection.observe([(n, slower * seconds(used[-1], n, link_at(step))) for n in SIZES])
        costs = [selection.cost_s for selection in ranks]
        before = ranks[0].chosen
        for selection in ranks:
            selection.decide(costs)
        assert len({selection.chosen for selection in ranks}) == 1
        if (step - 18) % EVERY_STEPS == 0 and step >= 18:
            decided.append(step)
        else:
            assert ranks[0].chosen == before, "decisions are rare"
    return used, decided


def test_the_best_is_found_and_found_again_after_the_link_has_changed() -> None:
    """A fast link: fewest rounds win; then one of a hundredth: two levels, within 200 steps."""
    used, _ = drive(900, lambda step: 1e11 if step <= 400 else 1e8)
    tried = set(used[:6])
    assert tried == {"overlapped", "reduce-scatter", "hierarchical", "ring", "tree", "mesh"}
    assert used[350] == "overlapped"
    assert used[600] == "hierarchical"
    assert used.count("mesh") < 0.03 * len(used), "what is slow is tried once in a hundred steps"


def test_what_is_a_little_faster_is_not_worth_a_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    used, decided = drive(300, lambda step: 1e9)
    assert len(decided) == 3
    assert len({used[step] for step in decided if step < len(used)}) == 1
    changes = [record.getMessage() for record in caplog.records]
    assert len(changes) <= 1
    assert all("which cost a step overlapped" in line for line in changes)


def test_without_neighbourhoods_there_are_no_two_levels() -> None:
    mesh: Any = SimpleNamespace(layout=FOUR, rank=1, nodes=())
    selection = ReducerSelection(ReductionPlan(), 1, mesh)
    assert "hierarchical" not in {name_of(selection.begin(step)) for step in range(1, 50)}


@pytest.mark.parametrize("layout", [FOUR, Layout(dp=2, pp=2, micro_batch=3)], ids=str)
def test_sums_are_exact_whichever_way_they_go(pool: Pool, layout: Layout) -> None:
    """Every step another way."""
    job = make_job("sgd", 12, comm=CommConfig(selector=True, bucket_mib=0.016))
    per_rank = pool.run(layout.world_size, run_layout, [job], layout)
    assert compare(job, layout, [results[0] for results in per_rank]) == []


def test_ranks_of_a_training_choose_alike(pool: Pool) -> None:
    job = make_job("sgd", 8, comm=CommConfig(selector=True, bucket_mib=0.016))
    ranks = pool.run(2, selected, job, Layout(dp=2, micro_batch=4), 24)
    assert ranks[0] == ranks[1]
    assert set(ranks[0][:6]) == {"overlapped", "reduce-scatter", "ring", "tree", "mesh"} - {"none"}
    assert len(set(ranks[0][15:])) == 1, "one after the decision"
