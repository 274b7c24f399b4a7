"""Experts in any order over an ep group: the same fp64 numbers, and a state that any other goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.coordinator.policies.restore_point import newest_slots
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.gloo.runtime.test_hf_remesh import claim
from tests.gloo.runtime.test_remesh import BATCH, LAYERS, job_of, uninterrupted
from tests.gloo.runtime.test_uneven_remesh import commit
from tests.support.gloo.layouts import model_of
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job, run_layout
from tests.support.gloo.parity import compare, primaries
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses, slots_in

BY_NUMBER: tuple[int, ...] = ()
ORDERS = (
    ((1, 3, 0, 2), (0, 3, 1, 2)),
    ((0, 2, 1, 3), BY_NUMBER),
    (BY_NUMBER, (3, 2, 1, 0), (1, 2, 0, 3), (2, 3, 0, 1)),
)
"""By layer. Two runs of one expert each, one of two, and none."""
BIASED = model_of("sinks", 2)
MADE = {"bias": model_of("bias", 2), "loss": model_of("loss", 3), "sinks": BIASED}
CASES = [
    (Layout(dp=2, ep=2, micro_batch=2, expert_order=ORDERS[0]), "sinks"),
    (Layout(dp=4, ep=4, micro_batch=2, expert_order=ORDERS[1]), "sinks"),
    (Layout(dp=4, ep=2, zero=2, micro_batch=2, expert_order=ORDERS[0]), "bias"),
    (Layout(dp=2, cp=2, ep=2, zero=3, micro_batch=2, expert_order=ORDERS[0]), "sinks"),
    (Layout(dp=2, tp=2, ep=2, zero=1, micro_batch=2, expert_order=ORDERS[1]), "bias"),
    (Layout(dp=2, ep=2, pp=2, micro_batch=2, expert_order=ORDERS[2]), "loss"),
]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.parity if at else (), id=f"{case[0]}-{case[1]}")
        for at, case in enumerate(CASES)
    ],
)
def test_any_order_trains_as_one_process(pool: Pool, layout: Layout, kind: str) -> None:
    job = make_job("adamw", 7, MADE[kind])
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []
    primaries(layout, ranks, MADE[kind])
    placed = sum(map(bool, layout.expert_order))
    assert layout.pp > 1 or f"{placed} placed by load" in " ".join(ranks[0].applied)


@pytest.mark.parity
def test_whole_matrices_are_put_together_from_any_order(pool: Pool) -> None:
    model = ModelConfig(**{**MADE["loss"].model_dump(), "layers": 2})
    job = make_job("muon", 7, model)
    layout = Layout(dp=4, ep=2, zero=2, micro_batch=2, expert_order=ORDERS[0])
    per_rank = pool.run(layout.world_size, run_layout, [job], layout)
    assert compare(job, layout, [results[0] for results in per_rank]) == []


WAYS = {
    "ep1": (Layout(dp=2, ep=2, micro_batch=3, expert_order=ORDERS[0]), Layout(micro_batch=6)),
    "others": (
        Layout(dp=2, ep=2, micro_batch=3, expert_order=ORDERS[0]),
        Layout(dp=2, ep=2, zero=2, micro_batch=3, expert_order=ORDERS[1]),
    ),
    "ep4": (
        Layout(dp=4, ep=2, zero=2, micro_batch=3, expert_order=ORDERS[0]),
        Layout(dp=4, ep=4, micro_batch=3, expert_order=ORDERS[1]),
    ),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if at else ()) for at, way in enumerate(WAYS)]
)
def test_a_run_goes_on_in_another_order(pool: Pool, tmp_path: Path, way: str) -> None:
    """After a kill, from slots: `remesh_jobs` holds the shares that are computed against those that hold."""
    before, after = WAYS[way]
    expected: dict[str, list[float]] = {}
    uninterrupted(pool, tmp_path, expected, "loss")
    job = job_of("loss", tmp_path)
    job = job.model_copy(update={"layout": job.layout.model_copy(update={"expert_placement": "by_load"})})
    run = Run(pool, job, tmp_path)
    outcomes = run.strike(before, (0, 3, "forward"))
    told = [one.expert_loads for one in outcomes if one.expert_loads]
    assert [[one.layer for one in loads] for loads in told] == [list(range(LAYERS))], "the last replica"
    assert {sum(one.loads) for one in told[0]} == {BATCH * 8 * job.model.moe.top_k}, "all steps but the last"
    run.finish(after)
    first, second = (spec.resume_step for spec in run.specs)
    assert first == 0 < second
    assert losses(run.ledger()) == pytest.approx(expected["loss"], rel=1e-9)


@pytest.mark.slow
def test_a_commit_holds_experts_by_their_numbers(pool: Pool, tmp_path: Path) -> None:
    """The slots are gone: chunks alone carry the state from one order into another."""
    before, after = WAYS["others"]
    expected: dict[str, list[float]] = {}
    uninterrupted(pool, tmp_path, expected, "loss")
    whole = job_of("loss", tmp_path)
    job = JobConfig.model_validate({**whole.model_dump(), "storage": {"url": str(tmp_path / "runs")}})
    store = RunStore(job, lambda _: None)
    run = Run(pool, job, tmp_path, term=claim(store))
    run.strike(before, (1, 5, "forward"))
    newest = newest_slots(slots_in(tmp_path), run.layouts, run.last)
    assert newest is not None
    run.origin = commit(run, store, newest.step)
    pool.drop(pool.workers)
    for path, _ in list_slots(tmp_path):
        path.unlink()
    run.finish(after)
    assert run.specs[-1].source.kind == "commit"
    assert losses(run.ledger()) == pytest.approx(expected["loss"][newest.step :], rel=1e-9)
    store.executor.shutdown()
    store.committer.shutdown()
