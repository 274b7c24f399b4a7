"""Runs that adapt while they go on: what was slow is changed, and losses are those of a run that is not.

A device that computes is a sleep per row here, since the cores of one machine are shared by all workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs.adapting_runs import adapting, sleeps, slow

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(900), pytest.mark.deep]


def test_a_worker_at_a_third_of_the_speed_costs_little(tmp_path: Path) -> None:
    """Whole rows allow 8 rows' time (8, 2, 8 and 6 rows in one micro-batch); evenly it is 18."""
    usual_s = 0.04
    held = ("layout.dp=4", "layout.tp=1", "layout.pp=1", "layout.zero=0", "layout.micro_batch=6")
    run = adapting(
        tmp_path,
        "rows",
        *("steps=130", "data.global_batch=24", "cluster.max_workers=4", "adapt.apply=[rows]", *held),
        chaos=sleeps(usual_s, 3 * usual_s, usual_s, usual_s),
    )
    assert run.summary["failures"] == []
    assert run.decisions == [("apply", "rows"), ("kept", "rows")]
    before_s, after_s = run.step_s(5, 45), run.step_s(run.last_start() + 5, 130)
    best_s = 8 * usual_s
    figures = f"{before_s:.3f} s a step, then {after_s:.3f} s"
    print(f"rows: {figures} ({run.layouts[-1]}); whole rows allow {best_s:.3f} s")
    assert best_s / after_s >= 0.85


STAGES = (
    *("model.layers=8", "data.global_batch=12", "cluster.max_workers=2"),
    *("layout.pp=2", "layout.dp=1", "layout.tp=1", "layout.micro_batch=2"),
)


def test_a_stage_that_becomes_slow_wins_back_half_of_its_loss(tmp_path: Path) -> None:
    run = adapting(
        tmp_path,
        "stages",
        *("steps=90", "adapt.apply=[stages]", *STAGES),
        chaos=[*sleeps(0.05, 0.05), slow(1, 0.15, step=31)],
    )
    assert run.summary["failures"] == []
    assert ("apply", "stages") in run.decisions
    first_remesh = run.summary["generations"][1]["start_step"]
    usual_s, slowed_s = run.step_s(10, 30), run.step_s(32, first_remesh)
    after_s = run.step_s(run.last_start() + 5, 90)
    back = (slowed_s - after_s) / (slowed_s - usual_s)
    print(
        f"stages: {usual_s:.3f} s, slowed {slowed_s:.3f} s, then {after_s:.3f} s; {100 * back:.0f} % won back"
    )
    assert back >= 0.5


BAD = {
    "micro-batch": ("layout.dp=2", "layout.tp=1", "layout.micro_batch=1", "cluster.max_workers=2"),
    "layout": ("layout.dp=1", "layout.tp=4", "layout.micro_batch=8", "cluster.max_workers=4"),
}
"""Rows one by one, and tensor parallelism of a model that is far too small for it."""


@pytest.mark.parametrize("kind", list(BAD))
def test_a_run_ends_sooner_than_one_held_in_its_bad_layout(tmp_path: Path, kind: str) -> None:
    bad = (
        "steps=120",
        "model.layers=4",
        "model.heads=4",
        "model.kv_heads=4",
        "data.global_batch=32",
        *BAD[kind],
        "layout.pp=1",
    )
    held = adapting(tmp_path, f"held-{kind}", *bad)
    run = adapting(tmp_path, f"free-{kind}", *bad, f"adapt.apply=[{kind}]")
    print(f"{kind}: {run.train_s:.1f} s ({' → '.join(run.layouts)}); held there {held.train_s:.1f} s")
    assert run.summary["failures"] == []
    assert run.train_s < held.train_s
    assert run.losses == pytest.approx(held.losses, rel=1e-9)


def test_memory_pressure_leads_to_recompute_and_not_to_a_crash(tmp_path: Path) -> None:
    """A worker may take so little that its peak is 95 % of it; the same run with room shows what it takes.

    Products are so wide that each is a mapping of its own, which the kernel gets back when it is freed.
    """
    model = ("model.hidden_size=16", "model.intermediate_size=5120", "model.layers=3", "data.global_batch=16")
    layout = ("layout.dp=2", "layout.tp=1", "layout.pp=1", "layout.zero=0", "layout.micro_batch=8")
    more = ("layout.recompute=none", "data.sequence_length=128", "optimizer.schedule.kind=constant")
    job = (*model, *layout, *more)
    roomy = adapting(tmp_path, "roomy", *job, "steps=14", "cluster.worker_memory_bytes=4000000000")
    peak = roomy.telemetry["memory"]["peak_bytes"]
    limit = f"cluster.worker_memory_bytes={int(peak / 0.95)}"
    run = adapting(tmp_path, "tight", *job, "steps=30", limit, "adapt.apply=[recompute]")
    after = run.telemetry["memory"]
    mb = [f"{nbytes / 1e6:.0f} MB" for nbytes in (peak, after["peak_bytes"], after["device_bytes"])]
    shares = f"{mb[0]}, then {mb[1]} of {mb[2]}"
    print(f"memory: {shares} ({' → '.join(run.layouts)})")
    assert run.summary["failures"] == []
    assert run.decisions == [("apply", "recompute"), ("kept", "recompute")]
    assert after["peak_bytes"] < 0.9 * after["device_bytes"]
    assert run.losses[:14] == pytest.approx(roomy.losses, rel=1e-9)


PLANTED = {
    "bucket": ("layout.dp=4", "layout.micro_batch=4", "cluster.max_workers=4", "comm.bucket_mib=0.002"),
    "recompute": ("layout.dp=2", "layout.micro_batch=4", "cluster.max_workers=2", "layout.recompute=full"),
}
"""Sums of gradients in hundreds of parts, and blocks that are computed again although there is room."""


@pytest.mark.parametrize("kind", list(PLANTED))
def test_a_planted_bottleneck_is_removed(tmp_path: Path, kind: str) -> None:
    steps = 600 if kind == "recompute" else 200  # it pays for its re-mesh, of steps that take less
    job = ("data.global_batch=16", *PLANTED[kind], "layout.tp=1", "layout.pp=1", "layout.zero=0")
    run = adapting(tmp_path, kind, f"steps={steps}", *job, "model.layers=6", f"adapt.apply=[{kind}]")
    before_s, after_s = run.told[0]["data"]["before_s"], run.step_s(run.last_start() + 5, steps)
    print(f"{kind}: {before_s:.4f} s a step, then {after_s:.4f} s ({' → '.join(run.layouts)})")
    assert run.decisions == [("apply", kind), ("kept", kind)]
    assert after_s < 0.9 * before_s


def test_a_change_that_hurts_is_taken_back(tmp_path: Path) -> None:
    """The planner would have all four compute, and cannot know that three of them are slow."""
    run = adapting(
        tmp_path,
        "hurts",
        *("steps=500", "data.global_batch=16", "cluster.max_workers=4", "adapt.apply=[layout]"),
        *("layout.dp=1", "layout.tp=1", "layout.pp=1", "layout.zero=0", "layout.micro_batch=4"),
        chaos=[slow(rank, 0.1) for rank in (1, 2, 3)],
    )
    print(f"hurts: {' → '.join(run.layouts)}")
    assert run.summary["failures"] == []
    assert run.decisions[:2] == [("apply", "layout"), ("back", "layout")]
    assert run.layouts[0] == run.layouts[2] != run.layouts[1]
