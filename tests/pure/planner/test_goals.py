"""Goals of a plan, each against what it promises, and their bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner import goals
from picotron_ray.planner.goals import (
    Goal,
    goal_of,
    plan_for,
    price_of,
    run_estimate,
    run_seconds,
    seconds_of,
)
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.plan import for_devices, plan
from picotron_ray.planner.refusal import leanest_bytes

H100 = hardware("h100-80g")
TOKENS = 1e12


@pytest.fixture(scope="module")
def job() -> Any:
    return load_job("llama-3-8b", ["data.path=unread"])


@pytest.mark.parametrize("days", [40, 90, 150, 300])
def test_the_fewest_meet_the_deadline_and_fewer_do_not(job: Any, days: float) -> None:
    goal = Goal("fewest", TOKENS, days * 86400)
    found = plan_for(job, 64, H100, goal)
    assert run_seconds(found, goal) <= goal.deadline_s
    fewer = plan(job, found.gpus - (8 if found.gpus > 8 else 1), H100, keep=1, buys=False)
    assert run_seconds(fewer, goal) > goal.deadline_s


def test_a_deadline_that_no_size_meets_names_the_best(job: Any) -> None:
    best = plan(job, 16, H100, keep=1, buys=False)
    for name in ("throughput", "fewest", "cheapest", "robust"):
        goal = Goal(name, TOKENS, 86400.0, price=1.0)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="best of up to 16 h100-80g") as raised:
            plan_for(job, 16, H100, goal)
        hours = TOKENS / best.tokens_per_s(best.best.cost.total_s) / 3600
        assert f"expected at least {hours:.3g} h" in str(raised.value) or name == "robust"


def test_the_cheapest_costs_no_more_than_any_size(job: Any) -> None:
    goal = Goal("cheapest", TOKENS, 120 * 86400.0, price=2.0)
    found = plan_for(job, 64, H100, goal)
    mine = run_estimate(found, goal)
    assert mine is not None
    assert mine.hours * 3600 <= goal.deadline_s
    for gpus in (16, 24, 32, 64):
        other = plan(job, gpus, H100, keep=1, buys=False)
        if run_seconds(other, goal) <= goal.deadline_s:
            estimate = run_estimate(other, goal)
            assert estimate is not None
            assert mine.price <= estimate.price * 1.0001


def test_interruptions_cost_their_recovery_and_half_a_step(job: Any) -> None:
    found = plan(job, 8, H100, keep=1, buys=False)
    calm, spot = Goal(tokens=TOKENS), Goal(tokens=TOKENS, interruptions=0.01)
    bare = run_seconds(found, calm)
    expected = 0.01 * 8 * bare / 3600 * (goals.RECOVERY_S + found.best.cost.total_s / 2)
    assert run_seconds(found, spot) - bare == pytest.approx(expected)
    assert run_estimate(found, Goal()) is None


def test_the_leanest_takes_least_of_all_candidates(job: Any) -> None:
    found = plan_for(job, 16, H100, Goal("memory"))
    assert found.best.memory_bytes == leanest_bytes(found.job, 16)
    assert found.best.memory_bytes < plan(job, 16, H100, buys=False).best.memory_bytes


def test_a_robust_layout_loses_least(job: Any) -> None:
    found = plan_for(job, 32, H100, Goal("robust", losing=1))
    after = [goals._after_loss_s(found, step.layout, 1) for step in found.table]
    assert after == sorted(after)
    assert after[0] >= found.best.cost.total_s * 0.99
    with pytest.raises(ConfigError, match="--losing: saw 4 of the nodes"):
        plan_for(job, 32, H100, Goal("robust", losing=4))


def test_a_balanced_layout_has_the_least_score(job: Any) -> None:
    found = plan_for(job, 32, H100, Goal("balanced"))
    reasons = [float(reason.split()[-1]) for _, reason in found.rejected if reason.startswith("score")]
    assert reasons == sorted(reasons)
    assert len(reasons) == 9


def test_times_and_prices_are_read() -> None:
    assert [seconds_of(text) for text in ("90s", "90m", "36h", "3d")] == [90, 5400, 129600, 259200]
    assert price_of("gpu-hour=1.1,interruptions=0.02") == (1.1, 0.02)
    goal = goal_of("cheapest", 2e12, "36h", "gpu-hour=2.5", None)
    assert goal == Goal("cheapest", 2e12, 129600.0, 2.5, 0.0, 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fast", None, None, None, None), "--goal: saw fast, expected one of throughput, memory"),
        (("fewest", 1e9, None, None, None), "--goal fewest: saw no --deadline"),
        (("cheapest", 1e9, "3d", None, None), "--goal cheapest: saw no --price"),
        (("fewest", None, "3d", None, None), "--deadline: saw no --tokens"),
        (("throughput", None, None, "gpu-hour=1", None), "--price: saw no --tokens"),
        (("throughput", -1.0, None, None, None), "--tokens: saw -1.0"),
        (("throughput", float("nan"), None, None, None), "--tokens: saw nan"),
        (("fewest", 1e9, "soon", None, None), "--deadline: saw soon, expected a time above 0"),
        (("fewest", 1e9, "0h", None, None), "--deadline: saw 0h"),
        (("cheapest", 1e9, None, "2.5", None), "--price: saw 2.5, expected gpu-hour=PRICE"),
        (("cheapest", 1e9, None, "gpu-hour=-1", None), "--price: saw gpu-hour=-1"),
        (("cheapest", 1e9, None, "gpu-hour=0", None), "--price: saw gpu-hour=0"),
        (("cheapest", 1e9, None, "gpu-hour=1,spot=1", None), "--price: saw gpu-hour=1,spot=1"),
        (("throughput", None, None, None, 2), "--losing: saw it with --goal throughput"),
    ],
    ids=str,
)
def test_bad_goals_are_one_line(words: tuple[Any, ...], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        goal_of(*words)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_fewer_replicas_that_do_not_fit_are_no_robust_layout(job: Any) -> None:
    """ZeRO-3 over eight replicas instead of sixteen holds twice the state a rank."""
    found = plan(job, 16, H100, buys=False)
    layout = Layout(dp=16, zero=3, micro_batch=1, recompute="full")
    alone = memory_estimate(found.job, layout).total_bytes
    left = memory_estimate(for_devices(job, 8), replace(layout, dp=8)).total_bytes
    assert left > alone
    for budget, fits in ((left, True), ((alone + left) / 2, False)):
        after = goals._after_loss_s(replace(found, budget_bytes=budget), layout, 1)
        assert (after < float("inf")) is fits
