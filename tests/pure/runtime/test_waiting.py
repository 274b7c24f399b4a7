"""Lines on what is waited for: none while it is quick, then one now and then."""

from __future__ import annotations

import io
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.driver import console, waiting
from picotron_ray.runtime.driver.console import ProgressView
from tests.support.runs.coordinator_world import World, job


def test_what_is_quick_is_not_told() -> None:
    said: list[str] = []
    with waiting.told(said.append, "Ray"):
        pass
    assert said == []
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_what_takes_long_is_told_again_and_again_until_it_ends() -> None:
    said: list[str] = []
    twice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    with pytest.raises(ValueError, match="refused"), waiting.told(say, "Ray", every_s=0.01):  # noqa: PT012
        assert twice.wait(60)
        raise ValueError("refused")
    known = len(said)
    assert all(re.fullmatch(r"waiting for Ray \(\d+ s\)", text) for text in said)
    assert len(said) == known, "nothing is told after the end"


def status(**changes: Any) -> dict[str, Any]:
    plain = {
        "run": "night", "state": "starting", "term": 0, "generation": None, "step": 0, "steps": 9,
        "loss": None, "resume_step": 0, "done": False, "stopping": False, "events": [], "recalled": 0,
        "tokens_per_s": None, "layout": None, "members": [],
    }  # fmt: skip
    return {**plain, **changes}


BEGUN = {"state": "running", "term": 1, "generation": "1.1"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "storage and nodes to answer"),
        ({"term": 2}, "workers to start"),
        (BEGUN, "the first step of generation 1.1"),
        ({**BEGUN, "resume_step": 40, "step": 40}, "the first step of generation 1.1"),
        ({**BEGUN, "step": 1}, ""),
        ({**BEGUN, "step": 4, "loss": 2.0}, ""),
        ({**BEGUN, "step": 4, "loss": 2.0, "stopping": True}, "the run to stop"),
        ({"done": True, "stopping": True}, ""),
    ],
)
def test_a_start_says_what_it_waits_for(changes: dict[str, Any], what: str) -> None:
    assert waiting.awaited(status(**changes)) == what


def test_a_follower_tells_at_most_one_line_each_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    for module in (waiting, console):
        times = SimpleNamespace(monotonic=lambda: clock.now, strftime=lambda *_: "12:00:00", localtime=float)
        monkeypatch.setattr(module, "time", times)
    out = io.StringIO()
    event = {"seq": 1, "t": 0.0, "level": "info", "kind": "node", "text": "node joined"}
    with ProgressView(Console(file=out, width=100)) as view:
        for second in range(60):
            clock.now = float(second)
            if second < 35:
                view.show(status(term=1, events=[event] if second == 12 else []))
            elif second < 38:
                view.show(status(**BEGUN, step=0))
            else:
                view.show(status(**BEGUN, step=second, loss=2.0))
    lines = [line for line in out.getvalue().splitlines() if "[running]" not in line]
    assert lines == [
        "waiting for workers to start (10 s)",
        "12:00:00 node joined",
        "waiting for workers to start (22 s)",
        "waiting for workers to start (32 s)",
    ]


def test_workers_that_are_missing_are_counted_in_each_line_and_in_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(job(cluster__min_workers=3, cluster__max_workers=4, cluster__start_timeout_s=120.0))
    world.begin(("a", 4))
    world.wait(20.0)
    record = RunRecord(job(cluster__min_workers=3))
    record.begin(1, {})
    record.waits = world.machine.waits
    told = record.status(0)
    text = "0 of 3 workers ready (cluster.min_workers); the run ends in 100 s without them"
    assert console.progress_line(told).endswith(f"on 0 workers in fp32  {text}")
    clock = SimpleNamespace(now=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(waiting, "time", times)
    lines = waiting.WaitLines()
    assert lines.due(told, 0.0) == ""
    clock.now = 12.0
    assert lines.due(told, 0.0) == f"waiting for workers to start (12 s): {text}"


def test_a_run_that_lost_its_workers_counts_those_that_it_waits_for() -> None:
    waits = {"ready": 1, "needed": 3, "wanted": 4, "left_s": None}
    lost = status(**BEGUN, step=7, loss=2.0, waits=waits)
    assert waiting.blocked(lost) == "workers to go on: 1 of 3 workers ready (cluster.min_workers)"
    enough = status(term=1, waits={**waits, "ready": 3, "left_s": 9.0})
    assert waiting.readiness(enough) == "3 of 4 workers ready; it begins with fewer in 9 s"
    assert waiting.readiness(status(done=True, waits=waits)) == ""
