"""Text for people: whole lines, and when they are shown."""

from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.coordinator.term_begin import BEFORE
from picotron_ray.runtime.driver import console as module
from picotron_ray.runtime.driver.console import (
    PLAIN_INTERVAL_S,
    RECENT,
    ProgressView,
    console,
    event_line,
    held_lines,
    metrics_lines,
    number,
    progress_line,
    submission_lines,
    summary_lines,
    table,
    telemetry_lines,
    worker_lines,
)

STATUS: dict[str, Any] = {
    "run": "night", "state": "running", "generation": "1.2", "step": 7, "steps": 100, "loss": 1.23456,
    "tokens_per_s": 12345.6, "layout": "dp=2", "members": ["w1", "w2"], "events": [], "done": False,
}  # fmt: skip


def event(text: str, level: str = "info", **more: Any) -> dict[str, Any]:
    at_s = time.mktime((2025, 1, 2, 3, 4, 5, 0, 0, -1))
    return {"seq": 1, "kind": "", "t": at_s, "level": level, "text": text, **more}


def test_figures_have_a_dash_where_there_is_none() -> None:
    assert [number(None), number(0.0), number(2.0, ".1f")] == ["-", "0.0000", "2.0"]


def test_a_line_of_progress() -> None:
    assert progress_line(STATUS) == "[running] step 7/100  loss 1.2346  12,346 tokens/s  dp=2 on 2 workers"
    more = {"eval_loss": 2.0, "baseline_loss": None, "precision": "fp8", "layout": None, "tokens_per_s": None}
    assert progress_line({**STATUS, **more}) == (
        "[running] step 7/100  loss 1.2346  eval_loss 2.0000 (bigram -)  - tokens/s  - on 2 workers in fp8"
    )


def test_an_event_has_its_time_and_level_and_short_names_of_nodes() -> None:
    node = "0123456789abcdef" * 3 + "01234567"
    assert event_line(event(f"node {node} joined")) == "03:04:05 node 01234567 joined"
    assert event_line(event(f"x{node}", "error")) == f"03:04:05 error: x{node}"


def test_addresses_of_metrics() -> None:
    assert metrics_lines({}) == metrics_lines({"metrics": None}) == []
    served = {"endpoints": {"n" * 20: "h:2", "coordinator": "h:1"}, "file": "/f.json"}
    assert metrics_lines({"metrics": served}) == [
        "metrics of coordinator: http://h:1/metrics",
        f"metrics of {'n' * 16}: http://h:2/metrics",
        "all of them, for Prometheus' file_sd_configs: /f.json",
    ]


def test_the_parts_of_a_step_are_told_the_largest_first() -> None:
    window = {"mean": 0.0, "max": 0.0, "min": 0.0, "std": 0.0}
    means = {"forward": 0.1, "backward": 0.25, "bubble": 0.001, "reduce": 0.049}
    told = {
        "steps": 97,
        "step_s": {**window, "mean": 0.4},
        "phase_s": {phase: {**window, "mean": mean} for phase, mean in means.items()},
    }
    assert telemetry_lines({**STATUS, "telemetry": told}) == [
        "a step takes 0.4 s over the last 97 steps: backward 62%, forward 25%, reduce 12%"
    ]
    assert telemetry_lines({**STATUS, "telemetry": None}) == telemetry_lines(STATUS) == []


def test_workers_by_rank_with_the_step_at_hand() -> None:
    pages = {"w2": {"pid": 5, "phase": "forward", "step": 7}}
    assert worker_lines({**STATUS, "pages": pages}) == [
        "rank 0: w1", "rank 1: w2, process 5, forward of step 8"
    ]  # fmt: skip


def test_ray_jobs_of_a_run() -> None:
    jobs = [{"submission_id": "a"}, {"submission_id": "b"}]
    assert submission_lines({}) == submission_lines({"submissions": []}) == []
    assert submission_lines({"submissions": jobs}) == ["submitted as a, b"]


SUMMARY: dict[str, Any] = {
    "run": "night",
    "status": "finished",
    "steps": 9,
    "wall_s": 2.04,
    "detail": "step 9",
}


def test_the_end_of_a_run_in_a_few_lines() -> None:
    figures = "eval_loss -  baseline_loss - (bigram entropy of the same data)  - tokens/s"
    assert summary_lines(SUMMARY) == ["run night finished at step 9 in 2.0 s", figures]
    assert summary_lines({**SUMMARY, "status": "failed", "detail": ""})[1:] == [figures]
    before = {**SUMMARY, "detail": f"step 9: all 5 {BEFORE}", "wall_s": 1729.7}
    first, second = summary_lines(before)[:2]
    assert first == "run night had finished at step 9 before; nothing to do (a larger `steps` goes on)"
    assert not second.startswith("because")
    out = io.StringIO()
    with ProgressView(Console(file=out)) as view:
        for more in (
            {"state": "starting", "step": 100, "term": 2},
            {"step": 150},
            {"step": 150, "done": True},
        ):
            view.show({**STATUS, **more})
    assert out.getvalue() == "", "it makes no progress"
    again = {**SUMMARY, "generations": [{"term": 1}, {"term": 1}, {"term": 2}]}
    assert summary_lines(again)[0] == "run night finished at step 9, 2.0 s after it first began"
    refused = {**SUMMARY, "status": "fenced", "detail": "another launch was begun first", "steps": 0}
    assert summary_lines(refused)[0] == "run night was fenced off by another claim", "it knows no step"
    paused = {**SUMMARY, "wall_s": 611.8, "lived_s": 60.0, "generations": [{"term": 1}]}
    assert summary_lines(paused)[0] == "run night finished at step 9, 611.8 s after it first began"
    assert (
        summary_lines({**SUMMARY, "generations": [{"term": 1}]})[0] == "run night finished at step 9 in 2.0 s"
    )
    failure = {"kind": "hang", "target": "w1", "step": 5, "lost_steps": 1, "recovered_s": 0.456}
    found = summary_lines(
        {
            **SUMMARY, "status": "failed", "detail": "why", "submissions": [{"submission_id": "a"}],
            "eval_loss": 1.0, "baseline_loss": 2.0, "tokens_per_s": 1000.4,
            "failures": [
                {**failure, "restored_from": "slots"},
                {**failure, "restored_from": None, "recovered_s": None},
            ],
            "checkpoints": [{"step": 3}, {"step": 9}],
            "ledger": {"samples": 90, "lost": 0, "repeated": 1},
        }
    )  # fmt: skip
    assert found == [
        "run night failed at step 9 in 2.0 s",
        "because: why",
        "submitted as a",
        "eval_loss 1.0000  baseline_loss 2.0000 (bigram entropy of the same data)  1,000 tokens/s",
        "survived hang of w1 at step 5: back in 0.46 s, 1 steps lost, restored from slots",
        "not survived: hang of w1 at step 5: its launch ended before another step",
        "2 commits, the newest of step 9; 90 samples fed, 0 lost, 1 repeated",
    ]
    told = [
        {"term": 1, "layout": "dp2", "measured_s": 0.25, "predicted_s": 0.3},
        {"term": 1, "measured_s": None},
    ]
    assert summary_lines({**SUMMARY, "generations": told})[2] == (
        "a step of dp2 took 0.25 s, by the planner 0.3 s"
    )
    empty = summary_lines({**SUMMARY, "ledger": {"samples": 0, "lost": 0, "repeated": 0}})
    assert empty[-1] == "0 commits, the newest of step -; 0 samples fed, 0 lost, 0 repeated"


def test_json_leaves_stdout_alone() -> None:
    assert (console(True).file, console(False).file) == (sys.stderr, sys.stdout)
    assert not console(False)._highlight


def shown(status: dict[str, Any]) -> list[str]:
    out = Console(file=io.StringIO(), record=True, width=120)
    out.print(table(status))
    return [" ".join(line.split()) for line in out.export_text().splitlines()]


def test_a_live_view_shows_every_figure() -> None:
    assert shown(STATUS) == [
        "run night (running, generation 1.2)", "step 7 of 100", "loss 1.2346 held-out -, bigram -",
        "speed 12,346 tokens/s", "layout dp=2", "members w1 w2", "jobs -",
    ]  # fmt: skip
    none = {"generation": None, "layout": None, "members": [], "submissions": [{"submission_id": "a"}]}
    found = shown({**STATUS, **none, "eval_loss": 2.0, "baseline_loss": 3.0})
    assert [found[at] for at in (0, 2, 4, 5, 6)] == [
        "run night (running, generation -)", "loss 1.2346 held-out 2.0000, bigram 3.0000", "layout -",
        "members -", "jobs submitted as a",
    ]  # fmt: skip


def test_a_run_that_is_held_says_so() -> None:
    pages = {"w1": {"phase": "hold", "step": 7, "pid": 1}, "w2": {"phase": "sync", "step": 7, "pid": 2}}
    [line] = held_lines({**STATUS, "pages": pages})
    assert line.startswith("held after step 7: `picotron-ray debug ls night` says by what")
    assert held_lines({**STATUS, "pages": {}}) == []


def test_a_run_with_a_debugger_says_whom_it_may_stop() -> None:
    pages = {
        f"w{rank}": {"phase": "data", "step": 7, "rank": rank, "debugged": int(rank > 1)} for rank in range(4)
    }
    expected = ["a debugger is attached to ranks 2-3: where it stops, all wait for it"]
    assert held_lines({**STATUS, "pages": pages}) == expected


def test_without_a_terminal_lines_come_with_events_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime, localtime=time.localtime)
    monkeypatch.setattr(module, "time", clock)
    out = io.StringIO()

    def lines() -> list[str]:
        found = out.getvalue().splitlines()
        out.seek(0)
        out.truncate()
        return found

    with ProgressView(Console(file=out, width=30)) as view:
        view.show({**STATUS, "events": [event("[bold]hello[/bold] " + "x" * 40, "warning")]})
        assert lines() == ["03:04:05 warning: [bold]hello[/bold] " + "x" * 40, progress_line(STATUS)]
        now[0] += PLAIN_INTERVAL_S
        view.show(STATUS)
        assert lines() == [], "the step is the same"
        view.show({**STATUS, "step": 0, "generation": None})
        assert lines() == [], "nothing runs yet"
        view.show({**STATUS, "step": 8})
        assert lines() == [progress_line({**STATUS, "step": 8})]
        now[0] += PLAIN_INTERVAL_S - 0.1
        view.show({**STATUS, "step": 9})
        assert lines() == []
        view.show({**STATUS, "step": 9, "done": True})
        assert lines() == [progress_line({**STATUS, "step": 9})]


def test_what_a_restarted_coordinator_recalls_is_not_shown_twice() -> None:
    out = io.StringIO()
    with ProgressView(Console(file=out, width=100)) as view:
        view.show({**STATUS, "events": [event("one"), event("two", seq=2)], "recalled": 0})
        again = [event("two", seq=11), event("missed", seq=12), event("two", seq=13)]
        view.show({**STATUS, "events": again, "recalled": 12})
    assert [line.split()[-1] for line in out.getvalue().splitlines() if line.startswith("03:04:05")] == [
        "one", "two", "missed", "two"
    ]  # fmt: skip


def test_the_end_is_told_once_by_the_lines_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    end = {**STATUS, "events": [event("run stopped", kind="stopped"), event("z")], "state": "stopped"}
    with ProgressView(Console(file=out, width=100)) as view:
        view.show({**end, "done": True})
    first = out.getvalue().splitlines()[0]
    assert first.endswith("z"), "not the end"


def test_a_terminal_keeps_the_last_events_below_the_table() -> None:
    out = Console(file=io.StringIO(), width=100, force_terminal=True)
    with ProgressView(out) as view:
        assert view._live is not None
        assert view._live.is_started
        for count in range(RECENT + 2):
            view.say(f"line {count}", "red")
        view.show({**STATUS, "events": [event("last", "error")]})
        assert [str(text) for text in view._recent] == [
            *(f"line {count}" for count in range(3, RECENT + 2)), "03:04:05 error: last"
        ]  # fmt: skip
        assert [text.style for text in view._recent][-2:] == ["red", "bold red"]
    assert not view._live.is_started
