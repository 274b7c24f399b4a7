"""A real run of two workers that is profiled and stopped by a breakpoint, by the commands' own code."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import breakpoints, comparisons, control, profile_run
from tests.support.runs.ray_runs import Watched, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400), pytest.mark.deep]


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A run that has taken some steps, and is stopped at the end."""
    many = {"interval_steps": 1_000_000}
    sections = {"checkpoint": many, "evaluate": {**many, "samples": 4}, "cluster": {"max_workers": 2}}
    watched = start(tiny_job("tools", tmp_path / "runs", steps=1_000_000, layout={"dp": 2}, **sections))
    monkeypatch.setattr(control, "connect_to_run", lambda run: (watched.coordinator, None))
    watched.until(lambda status: status["step"] >= 5)
    yield watched
    watched.coordinator.request.remote("stop")
    watched.finish()


def options(folder: Path, **changes: object) -> profile_run.ProfileOptions:
    values: dict[str, object] = {"wait": 1, "warmup": 1, "active": 2, "ranks": "all", "to": folder}
    return profile_run.ProfileOptions(**{**values, "shapes": True, "stacks": False, **changes})  # type: ignore[arg-type]


def test_a_live_run_is_profiled_and_held(live: Watched, tmp_path: Path) -> None:
    told: list[str] = []
    found = profile_run.profile("tools", options(tmp_path / "profile"), told.append)
    with gzip.open(found["trace"]) as file:
        events = json.load(file)["traceEvents"]
    for rank in (0, 1):
        names = {event["name"] for event in events if event["pid"] // 100 == rank}
        assert {f"ProfilerStep#{step}" for step in found["steps"]} <= names
    assert found["clocks_within_s"] < 1.0, "both ranks are on this machine"
    assert abs(found["ranks"]["1"]["clock_ahead_s"]) <= found["clocks_within_s"]
    assert len(list((tmp_path / "profile" / "tensorboard").iterdir())) == 2
    print("\n".join(profile_run.lines(found)))

    one = breakpoints.add("tools", "phase:reduce", "loss > 0", "1", 120.0)
    deadline = time.monotonic() + 60
    while not (seen := breakpoints.listed("tools"))["held_step"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert seen["hits"][0]["rank"] == 1
    tensors = breakpoints.inspect("tools", "model", "", "", True)["tensors"]
    assert all(figures["norm"] >= 0 for figures in tensors.values())
    time.sleep(5)
    assert breakpoints.listed("tools")["held_step"] == seen["held_step"]
    live.look()
    assert not [event for event in live.events if event["kind"] == "failure"]
    breakpoints.change("tools", one["number"], "rm")
    assert breakpoints.go_on("tools") == (seen["held_step"], [])
    live.until(lambda status: status["step"] > seen["held_step"] + 5)
    assert not live.status["failures"]
    told = [event["data"] for event in live.events if event["kind"] == "held"]
    assert [each["held"] for each in told] == [True, False]
    assert told[1]["held_s"] > 4, "it was held for more than 5 s, of which a heartbeat may miss one"


def test_a_live_run_is_compared_and_raced_and_goes_on(live: Watched) -> None:
    found = comparisons.inconsistency("tools", print)
    assert (found["first"], found["ranks"], found["left_out"]) == (None, 2, 0)
    assert min(found["compared"].values()) > 5
    raced = comparisons.race("tools", print)
    assert (raced["races"], raced["notes"]) == ([], [])
    assert raced["compared"] > 20
    print("\n".join(comparisons.inconsistency_lines(found) + comparisons.race_lines(raced)))
    live.until(lambda status: status["step"] > raced["step"] + 20)
    assert not live.status["failures"]


def test_what_cannot_be_done_is_one_line(live: Watched, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--ranks: saw '2', expected ranks from 0 to 1"):
        profile_run.profile("tools", options(tmp_path / "p", ranks="2"), print)
    assert not (tmp_path / "p").exists()
    with pytest.raises(ConfigError, match="run by no function; nearest line that is"):
        breakpoints.add("tools", "train/loop.py:1", "", "", 60.0)
    with pytest.raises(ConfigError, match="is none of the files that this run has loaded"):
        breakpoints.add("tools", "no_such_file.py:1", "", "", 60.0)
    with pytest.raises(ConfigError, match="continue: no breakpoint holds run tools"):
        breakpoints.go_on("tools")
    with pytest.raises(ConfigError, match="rm: saw breakpoint 7, expected one of the run's: none"):
        breakpoints.change("tools", 7, "rm")
    traced = breakpoints.trace("tools", "call", 2, "", tmp_path / "trace", print)
    assert traced[0]["events"] > 0
