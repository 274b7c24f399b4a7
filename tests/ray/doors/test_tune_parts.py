"""Parts of a study that use Ray Tune's classes, without a cluster: budget, schedulers, table."""

from __future__ import annotations

import io
import math
import pickle
import sys

import pytest
from rich.console import Console

from tests.support.fake_trial import FakeTrial
from tuning.spaces import Choice, Range
from tuning.study_options import StudyOptions


def test_a_budget_counts_workers_that_compute_over_all_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuning import budget

    now = [0.0]
    monkeypatch.setattr(budget.time, "monotonic", lambda: now[0])
    options = StudyOptions(name="s", kind="layout", gpu_hours=0.01, wall_s=100.0)  # 36 worker seconds
    trials = [FakeTrial("a", {"layout": "small"}), FakeTrial("b", {"layout": "big"}), FakeTrial("c", {})]
    trials[2].status = "ERROR"
    spent = budget.StudyBudget(options, {"small": 1, "big": 4}, 4, concurrent=1)
    spent.on_step_end(0, trials)
    now[0] = 5.0
    spent.on_step_end(1, trials)
    assert spent.get_state() == {"worker_s": 20.0, "wall_s": 5.0}, "b computes, a waits for its place"
    assert not spent.stop_all()
    kept = pickle.dumps(spent)
    resumed = budget.StudyBudget(options, {"small": 1, "big": 4}, 4, concurrent=1)
    assert pickle.loads(kept) is resumed, "Tune's stopper is the callback that counts"
    resumed.set_state(spent.get_state())
    now[0] = 1000.0  # between the launches nothing is spent
    resumed.on_step_end(0, trials)
    now[0] = 1004.0
    resumed.on_step_end(1, trials)
    assert resumed.get_state() == {"worker_s": 36.0, "wall_s": 9.0}
    assert resumed.stop_all()


def test_pb2_sees_logarithms_and_stays_in_its_axes() -> None:
    pytest.importorskip("sklearn")
    from ray.tune.schedulers.pbt import _PBTTrialState

    from tuning.schedulers import LogarithmicPB2, scheduler

    space = {
        "rate": Range(1e-5, 1e-1, log=True), "decay": Range(0.0, 0.1), "warmup": Range(0, 9, whole=True),
        "batch": Choice((16, 32)),
    }  # fmt: skip
    options = StudyOptions(name="s", kind="hparams", search="pb2", trials=3, objective="eval_loss")
    pb2 = scheduler(options, space, 3)
    assert isinstance(pb2, LogarithmicPB2)
    pb2.set_search_properties("eval_loss", "min")
    rates = (1e-4, 1e-3, 1e-2)
    trials = [
        FakeTrial(str(at), {"rate": rate, "decay": 0.01 * at, "warmup": at, "batch": 16})
        for at, rate in enumerate(rates)
    ]
    states = [_PBTTrialState.__new__(_PBTTrialState) for _ in trials]
    for time in (1, 2, 3):
        for at, (trial, state) in enumerate(zip(trials, states, strict=True)):
            pb2._save_trial_state(state, time, {"round": time, "eval_loss": 3.0 - at * time / 4}, trial)
    assert set(pb2.data["rate"]) == {math.log(rate) for rate in rates}
    found, _ = pb2._get_new_config(trials[0], trials[2])  # type: ignore[arg-type]
    assert 1e-5 <= found["rate"] <= 1e-1
    assert 0 <= found["decay"] <= 0.1
    assert found["warmup"] in range(10)
    assert found["batch"] == 16
    assert (found["rate"], found["decay"]) != (1e-2, 0.02), "it explores"
    assert trials[2].config["rate"] == 1e-2


def test_a_terminal_shows_what_runs_first_and_how_many_of_each_there_are() -> None:
    from tuning.live_table import table
    from tuning.trial_rows import row_of

    ended = FakeTrial("t1", {"optimizer.learning_rate": 0.01}, "TERMINATED", {"finished": True, "loss": 2.5})
    runs = FakeTrial("t2", {"optimizer.learning_rate": 0.02}, "RUNNING", {"step": 7, "loss": float("nan")})
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table([row_of(ended), row_of(runs)], ["loss"], 9, 12.0))
    console.file.close()
    lines = [line for line in console.export_text().splitlines() if "learning_rate" in line or "run" in line]
    assert "1 finished, 1 running, 7 to come of 9 trials, 12 s; best t1: loss 2.5" in lines[0]
    assert "t2" in lines[1]
    assert "learning_rate=0.02" in lines[1]
    assert "2.5" in lines[2]


def test_a_terminal_shows_trials_and_nothing_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuning.live_table import LiveTable

    seen, rays = io.StringIO(), io.StringIO()
    console = Console(file=seen, force_terminal=True, width=100)
    shown = LiveTable(console, ["loss"], 2)
    assert pickle.loads(pickle.dumps(shown)).__dict__ == {}, (
        "Tune keeps nothing that a later version must read"
    )
    monkeypatch.setattr(sys, "stdout", rays)
    shown.setup()
    print("(raylet) A worker died")
    ended = FakeTrial("t1", {"a": 1}, "TERMINATED", {"finished": True, "loss": 2.5})
    shown.on_step_end(1, [ended])
    shown.on_trial_complete(1, [ended], ended)
    shown.close()
    assert "t1  finished" in seen.getvalue()
    assert "best t1: loss 2.5" in seen.getvalue()
    assert "raylet" in rays.getvalue()
    assert "raylet" not in seen.getvalue()
