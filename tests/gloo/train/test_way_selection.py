"""The choice of a reducer: whose turn it is, decisions at most every 100 steps, one for all ranks."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from picotron_ray.comm.collectives.collectives import Collectives
from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.comm.reducers.selector import EVERY_STEPS
from picotron_ray.comm.wire_bytes import ACTIVATIONS
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.train.reduction_plan import axes_of, inner_ranks, reduction_candidates
from picotron_ray.train.way_selection import THINGS, Cost, Traveller, WayChoice, WaySelection
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job, run_layout
from tests.support.gloo.parallel_jobs.reducer_jobs import selected
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Pool

SIZES = (1_000_000, 4_000_000)
FOUR = Layout(dp=4, micro_batch=1)


NODES = ("a", "a", "b", "b")
NAMES = list(reduction_candidates(ReductionPlan(), 2, 4))


def seconds(name: str, nbytes: int, across_bytes_s: float) -> float:
    """Two levels send a quarter across; flat ways three quarters, over a link that is the bottleneck."""
    share = {"hierarchical": 0.25, "mesh": 1.5}.get(name, 0.75)
    latency = {"overlapped": 1e-3, "hierarchical": 4e-3, "tree": 2e-3}.get(name, 3e-3)
    return latency + share * nbytes / across_bytes_s


def drive(steps: int, link_at: Any) -> tuple[list[str], list[int]]:
    """What was used at each step, and the steps at which there was a decision; four ranks in step."""
    ranks = [WayChoice("gradients", NAMES, "across nodes", rank == 0) for rank in range(4)]
    used, decided = [], []
    for step in range(1, steps + 1):
        names = {choice.begin(step) for choice in ranks}
        assert len(names) == 1, "all ranks sum alike"
        used.append(names.pop())
        slowest = max(1 + 0.3 * rank for rank in range(4))
        cost = Cost(sum(SIZES), sum(slowest * seconds(used[-1], n, link_at(step)) for n in SIZES))
        before = ranks[0].chosen
        for choice in ranks:
            choice.decide(cost)
        assert len({choice.chosen for choice in ranks}) == 1
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


def test_what_the_host_does_not_wait_for_is_not_measured() -> None:
    """On CUDA a call returns before its collective has begun: its microseconds are no cost of a step."""
    with FakeTensorMode(), warnings.catch_warnings():
        buffers = torch.empty(8), torch.empty(8, device="cuda")
    counts = Collectives(ACTIVATIONS), Collectives(ACTIVATIONS)
    for one, buffer in zip(counts, buffers, strict=True):
        with one._timed(32, buffer):
            time.sleep(0.01)
    assert [one.moved_bytes for one in counts] == [32, 32]
    assert counts[0].cost_s >= 0.01 > counts[1].cost_s == 0.0
    choice = WayChoice("activations", ["auto"], "in a node", timed=False)
    for step in range(1, 20):
        choice.begin(step)
        choice.decide(Cost(32, counts[1].cost_s))
    assert (choice.predicted_s, choice.measured_s) == (None, None)
    selection = WaySelection({"activations": Traveller({"auto": lambda: None}, Cost, timed=False)})
    for step in range(1, 20):
        selection.begin(step)
        selection.decide(selection.costs())
    assert selection.figures() == {}


def test_a_cost_that_would_make_the_host_wait_is_read_after_the_exchange() -> None:
    read: list[int] = []

    def cost() -> Cost:
        read.append(len(read))
        return Cost(1e6, 0.001 * len(read))

    selection = WaySelection({"gradients": Traveller({"auto": lambda: None}, cost, late=True)})
    for step in range(1, 6):
        selection.begin(step)
        costs = selection.costs()
        assert len(read) == step - 1, "not before"
        assert costs[THINGS.index("gradients")].seconds == pytest.approx(0.001 * (step - 1))
        selection.decide(costs)
    assert selection.figures()["gradients"][1] == pytest.approx(0.004)


def test_the_model_predicts_what_is_measured_next() -> None:
    choice = WayChoice("experts", ["flat"], "in a node")
    for step in range(1, 20):
        choice.begin(step)
        choice.decide(Cost(1e6, 0.004))
    assert (choice.predicted_s, choice.measured_s) == (pytest.approx(0.004, rel=1e-3), 0.004)


def mesh_of(layout: Layout, nodes: tuple[str, ...], rank: int = 0) -> Mesh:
    return Mesh(layout, rank, None, nodes=nodes)


@pytest.mark.parametrize(
    ("layout", "nodes", "asked", "inner"),
    [
        (FOUR, NODES, {}, {"gradients": 2}),
        (FOUR, ("a", "a", "a", "b"), {}, {"gradients": 1}),
        (FOUR, (), {"inner_ranks": 2}, {"gradients": 2}),
        (Layout(dp=2, tp=2), NODES, {}, {"gradients": 1, "activations": 1}),
        (Layout(tp=4), NODES, {}, {"activations": 2}),
        (Layout(dp=4, zero=1, ep=4), NODES, {}, {"gradients": 2, "parameters": 2, "experts": 2}),
    ],
    ids=str,
)
def test_what_travels_and_where_there_are_neighbourhoods(
    layout: Layout, nodes: tuple[str, ...], asked: dict[str, Any], inner: dict[str, int]
) -> None:
    comm = CommConfig(**asked)
    for rank in range(4):
        mesh = mesh_of(layout, nodes, rank)
        axes = axes_of(mesh)
        assert {thing: inner_ranks(comm, mesh, axis) for thing, axis in axes.items()} == inner
    assert "activations" not in axes_of(mesh_of(layout, nodes), overlap=True)


def test_a_thousand_ranks_are_looked_at_quickly() -> None:
    layout = Layout(dp=128, tp=8, zero=1, ep=8)
    mesh = mesh_of(layout, tuple(f"node{rank // 8}" for rank in range(1024)))
    began = time.process_time()
    assert {inner_ranks(CommConfig(), mesh, axis) for axis in axes_of(mesh).values()} == {1}
    assert time.process_time() - began < 1.0


def test_without_neighbourhoods_there_are_no_two_levels() -> None:
    assert "hierarchical" not in reduction_candidates(ReductionPlan(), 1, 4)


def test_a_mesh_of_a_thousand_is_not_even_tried() -> None:
    """One step of it would send as much as 500 of a ring."""
    assert "mesh" in reduction_candidates(ReductionPlan(), 2, 8)
    assert list(reduction_candidates(ReductionPlan(), 8, 1000)) == [name for name in NAMES if name != "mesh"]


@pytest.mark.parametrize("layout", [FOUR, Layout(dp=2, pp=2, micro_batch=3)], ids=str)
def test_sums_are_exact_whichever_way_they_go(pool: Pool, layout: Layout) -> None:
    """Every step another way."""
    job = make_job("sgd", 12, comm=CommConfig(selector=True, bucket_mib=0.016))
    per_rank = pool.run(layout.world_size, run_layout, [job], layout)
    assert compare(job, layout, [results[0] for results in per_rank]) == []


EVERYTHING = {
    "dp2": (Layout(dp=2, micro_batch=4), {"gradients"}),
    "zero3-tp2": (Layout(dp=2, tp=2, zero=3, micro_batch=4), {"gradients", "parameters", "activations"}),
    "dp2-ep2": (Layout(dp=2, ep=2, micro_batch=4), {"experts"}),
}


@pytest.mark.parametrize("name", ["dp2", "zero3-tp2"])
def test_ranks_of_a_training_choose_alike(pool: Pool, name: str) -> None:
    layout, things = EVERYTHING[name]
    job = make_job("sgd", 8, comm=CommConfig(selector=True, bucket_mib=0.016))
    ranks = pool.run(layout.world_size, selected, job, layout, 24)
    assert all(used == ranks[0] for used in ranks)
    ways = {"gradients": 1 if layout.zero else 5, "parameters": 3, "activations": 3}
    for thing in things - ({"gradients"} if layout.zero else set()):
        used = [each[thing] for each in ranks[0]]
        assert len(set(used[: ways[thing]])) == ways[thing], "each is tried"
        assert len(set(used[3 * ways[thing] :])) == 1, "one after the decision"
