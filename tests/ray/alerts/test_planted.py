"""Ten anomalies planted in live runs of two workers are found in the stated delay, by their rules.

They strike by scripted faults (``chaos``) and by a storage that is broken under the run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.observability.alerts.rules import BY_NAME
from tests.support.runs.planted_anomalies import (
    ROW_S,
    await_finding,
    everywhere,
    planted_job,
    stated_delay_s,
    struck_at,
)
from tests.support.runs.ray_runs import Watched, start

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(600)]

LASTING: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("gradient-exploding", "scale-gradients", {"factor": 40.0}, {"factor": 1.0}),
    ("gradient-vanishing", "scale-gradients", {"factor": 1e-4}, {"factor": 1.0}),
    ("loss-spike", "scale", {"factor": 60.0}, {"factor": 1.0}),
    ("throughput", "slow", {"row_s": 4 * ROW_S}, {"row_s": ROW_S}),
    ("data-stall", "slow-data", {"row_s": 0.02}, {"row_s": 0.0}),
)
"""Rule, fault of both workers, how much, and what ends it."""
FIRST, LASTS, APART = 450, 200, 200
"""Steps: before the first fault, for which one lasts, and from its end to the next."""


def stop(watched: Watched) -> None:
    watched.coordinator.request.remote("stop")
    watched.finish()


def check_delay(watched: Watched, rule: str, struck_s: float, interval_s: float) -> dict[str, Any]:
    found = await_finding(watched, rule, struck_s - 0.5)
    delay_s, stated_s = found["t"] - struck_s, stated_delay_s(rule, interval_s)
    print(f"{rule}: found {delay_s:.1f} s after it struck, stated {stated_s:.1f} s: {found['text']}")
    assert delay_s <= stated_s, found
    return found


@pytest.mark.deep
def test_what_lasts_is_found_and_is_over_when_it_ends(tmp_path: Path) -> None:
    """Five anomalies of both workers, then one of a single one, in one run."""
    faults: list[dict[str, Any]] = []
    step = FIRST
    for _, fault, strong, over in LASTING:
        faults += everywhere(fault, step, **strong) + everywhere(fault, step + LASTS, **over)
        step += LASTS + APART
    faults.append({"fault": "slow", "target": "worker:1", "step": step, "row_s": 6 * ROW_S})
    job = planted_job("planted", tmp_path, faults)
    watched, first = start(job), 2  # faults before those planted: the pace of both workers
    for number, (rule, *_) in enumerate(LASTING):
        at = first + 4 * number
        watched.until(lambda s, at=at: s["step"] >= job.chaos[at].step + 5)
        check_delay(watched, rule, struck_at(job, at), 0.5)
    at = first + 4 * len(LASTING)
    watched.until(lambda s: s["step"] >= job.chaos[at].step + 5)
    found = check_delay(watched, "straggler", struck_at(job, at), 0.5)
    assert found["data"]["rank"] == 1
    assert found["data"]["node"]
    over = {e["data"]["rule"] for e in watched.events if e["kind"] == "alert" and e["data"].get("at_s")
            and e["data"]["state"] == "resolved"}  # fmt: skip
    assert over >= {rule for rule, *_ in LASTING}
    stop(watched)


@pytest.mark.deep
def test_memory_that_grows_is_a_leak_and_then_nearly_full(tmp_path: Path) -> None:
    interval_s = 1.5  # a worker reads its memory once a second
    leak = {"fault": "leak", "target": "worker:1", "step": 400, "pass_bytes": 1 << 18}
    job = planted_job(
        "leaking", tmp_path, [leak], telemetry={"interval_s": interval_s},
        # of which the last tenth is filled in more than a window and a reading of the memory
        cluster={"max_workers": 2, "worker_memory_bytes": 600 << 20},
    )  # fmt: skip
    watched = start(job)
    watched.until(lambda s: s["step"] >= 405)
    struck_s = struck_at(job, 2)
    check_delay(watched, "leak", struck_s, interval_s)
    found = await_finding(watched, "device-memory", struck_s, 240.0)
    assert found["level"] == "error"
    assert found["data"]["evidence"]["device_memory_ratio"] < 0.99, "told before it is full"
    stop(watched)


def test_a_nan_is_critical_and_the_run_goes_back_and_recovers(tmp_path: Path) -> None:
    """The config would skip the step; the rule asks to go back, and the coordinator does."""
    nan = {"fault": "nan", "target": "worker:1", "step": 60}
    job = planted_job(
        "nan", tmp_path, [nan], alerts={"act": [{"rule": "nan", "do": "rewind"}]},
        elastic={"heartbeat_s": 0.25, "rewind_steps": 5, "grow": False}, checkpoint={"interval_steps": 20},
    )  # fmt: skip
    watched = start(job)
    watched.until(lambda s: s["step"] >= 61)
    found = check_delay(watched, "nan", struck_at(job, 2), 0.5)
    assert (found["level"], found["data"]["act"], found["data"]["step"]) == ("error", "rewind", 60)
    back = watched.until(lambda s: s["generation"] == "1.2" and s["step"] >= 80)
    assert back["resume_step"] <= 55
    (answer,) = [e for e in watched.events if e["kind"] == "rule-act"]
    assert answer["data"]["done"]
    assert back["failures"] == [], "the rewind was asked for, and is no failure"
    assert back["loss"] == pytest.approx(watched.status["loss"])
    stop(watched)


@pytest.mark.deep
def test_failures_that_follow_each_other_and_commits_that_fall_behind(tmp_path: Path) -> None:
    kills = [{"fault": "kill", "target": "worker:1", "step": step} for step in (100, 160, 220)]
    job = planted_job(
        "failing", tmp_path, kills, checkpoint={"interval_steps": 20},
        cluster={"min_workers": 2, "max_workers": 2},  # who is lost is waited for
    )  # fmt: skip
    watched = start(job)
    watched.until(lambda s: len(s["failures"]) == 3)
    struck_s = struck_at(job, 4)
    found = await_finding(watched, "recovery-loop", struck_s)
    recovered_s = max(f["recovered_s"] or 0.0 for f in watched.status["failures"])
    assert found["t"] - struck_s <= stated_delay_s("recovery-loop", 0.5) + recovered_s
    assert found["level"] == "error"
    watched.until(lambda s: s["committed"] >= 220)
    store = tmp_path / "failing"
    (store / "log").rename(store / "log-away")
    (store / "log").write_text("no folder")
    broken_s, lag = time.time(), int(BY_NAME["durability-lag"].threshold * 20)
    committed = watched.look()["committed"]
    watched.until(lambda s: s["step"] >= committed + lag + 21)
    late = await_finding(watched, "durability-lag", broken_s)
    assert late["t"] - time.time() <= 1.0
    (store / "log").unlink()
    (store / "log-away").rename(store / "log")
    watched.until(lambda s: s["committed"] > committed)
    stop(watched)
