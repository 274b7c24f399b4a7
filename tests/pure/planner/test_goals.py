"""Goals of a plan, each against what it promises, and their bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError
from picotron_ray.planner import goals
from picotron_ray.planner.after_loss import after_loss_s, said_after
from picotron_ray.planner.goals import (
    Goal,
    deadline_of,
    goal_of,
    plan_for,
    price_of,
    run_estimate,
    run_seconds,
    said_hours,
)
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.plan import plan
from picotron_ray.planner.plan_text import plan_lines
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
        assert f"expected at least {said_hours(hours)}, the best" in str(raised.value) or name == "robust"


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
    bare, whole = run_seconds(found, calm), run_seconds(found, spot)
    lost = 0.01 * 8 * whole / 3600 * (goals.RECOVERY_S + found.best.cost.total_s / 2)
    assert whole == pytest.approx(bare + lost)
    assert run_estimate(found, Goal()) is None


@pytest.mark.parametrize("name", ["throughput", "fewest", "cheapest", "robust"])
def test_a_run_that_is_interrupted_faster_than_it_recovers_is_refused(job: Any, name: Any) -> None:
    goal = Goal(name, TOKENS, 1e12, price=2.0, interruptions=1000.0)
    with pytest.raises(ConfigError, match=r"--price: saw interruptions=1000, one each .* never ends"):
        plan_for(job, 16, H100, goal)


def test_fewer_devices_may_meet_a_deadline_that_interruptions_of_more_miss(job: Any) -> None:
    few = plan(job, 16, H100, keep=1, buys=False)
    rate = 0.9 * 3600 / 64 / (goals.RECOVERY_S + few.best.cost.total_s / 2)
    goal = Goal("fewest", TOKENS, interruptions=rate)
    goal = replace(goal, deadline_s=1.01 * run_seconds(few, goal))
    assert run_seconds(plan(job, 64, H100, keep=1, buys=False), goal) > goal.deadline_s
    assert plan_for(job, 64, H100, goal).gpus <= 16


def test_the_leanest_takes_least_of_all_candidates(job: Any) -> None:
    found = plan_for(job, 16, H100, Goal("memory"))
    assert found.best.memory_bytes == leanest_bytes(found.job, 16)
    assert found.best.memory_bytes < plan(job, 16, H100, buys=False).best.memory_bytes


def test_a_robust_layout_loses_least(job: Any) -> None:
    found = plan_for(job, 32, H100, Goal("robust", losing=1))
    after = [after_loss_s(found, 1)[step.layout] for step in found.table]
    assert after == sorted(after)
    assert after[0] >= found.best.cost.total_s * 0.99
    with pytest.raises(ConfigError, match="--losing: saw 4 of the nodes"):
        plan_for(job, 32, H100, Goal("robust", losing=4))


def test_a_loss_is_judged_by_the_best_that_is_left(job: Any) -> None:
    """The fastest layout survives a loss with fewer replicas that compute more again."""
    found = plan_for(job, 64, H100, Goal("robust", losing=3))
    fastest = plan(job, 64, H100, keep=1, buys=False)
    assert found.best.layout == fastest.best.layout
    left = plan(job, 40, H100, keep=1, buys=False).best
    assert (left.layout.tp, left.layout.pp) == (fastest.best.layout.tp, fastest.best.layout.pp)
    assert found.reason == f"{left.cost.total_s:.4g} s a step after losing 3 nodes"
    assert "inf" not in "".join((found.reason, *(reason for _, reason in found.rejected)))


def test_degrees_that_are_asked_for_do_not_fit_after_a_loss(job: Any) -> None:
    words = ("layout.dp=16", "layout.tp=1", "layout.pp=1", "cluster.max_workers=16")
    fixed = load_job("llama-3-8b", ["data.path=unread", *words])
    with pytest.raises(
        ConfigError, match="--losing: saw 1 of the nodes, expected one of these layouts to fit"
    ):
        plan_for(fixed, 16, H100, Goal("robust"))
    assert said_after(float("inf"), 2) == "does not fit after losing 2 nodes"


@pytest.mark.parametrize("name", ["memory", "robust", "balanced"])
def test_what_more_would_buy_in_seconds_is_no_answer_to_other_goals(job: Any, name: Any) -> None:
    found = plan_for(job, 16, H100, Goal(name))
    assert not found.purchases
    assert not any("would make a step" in line for line in plan_lines(found))
    assert plan_for(job, 16, H100, Goal()).purchases


def test_a_balanced_layout_has_the_least_score(job: Any) -> None:
    found = plan_for(job, 32, H100, Goal("balanced"))
    reasons = [float(reason.split()[-1]) for _, reason in found.rejected if reason.startswith("score")]
    assert reasons == sorted(reasons)
    assert len(reasons) == 9
    assert found.reason.endswith(", lower is better")


def test_times_and_prices_are_read() -> None:
    assert [deadline_of(text) for text in ("90s", "90m", "36h", "3d")] == [90, 5400, 129600, 259200]
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


def test_a_deadline_that_no_number_meets_takes_few_searches(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of 16,384 devices takes seconds, and there are 2,055 sizes."""
    some, looked = plan(job, 16, H100, keep=1, buys=False), []

    def planned(job: Any, gpus: int, hardware: Any) -> Any:
        looked.append(gpus)
        return some

    monkeypatch.setattr(goals, "_planned", planned)
    monkeypatch.setattr(goals, "plan", lambda *_, **__: some)
    with pytest.raises(ConfigError, match="--deadline: saw"):
        goals._fewest(job, 16384, H100, Goal("fewest", TOKENS, 1.0, interruptions=1e-6))
    assert len(looked) < 50
    assert looked[-1] == 16384
