"""Steps against the planner's estimate: told once a generation, warned of where it drifts."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.calibration import StepWindow, drifted, ratio_of
from tests.pure.coordinator.test_planning import running, world
from tests.support.runs.coordinator_world import World, of


def told(commands: list[m.Command]) -> list[m.Alert]:
    return [alert for alert in of(commands, m.Alert) if alert.kind == "calibration"]


def started() -> tuple[World, m.GenerationSpec]:
    """Four workers, three steps on."""
    there = world(steps=100_000)
    spec, _ = running(there, ("a", 4))
    return there, spec


def train(there: World, spec: m.GenerationSpec, steps: int, step_s: float, first: int) -> list[m.Command]:
    """Heartbeats, one after each step."""
    commands = []
    for step in range(first, first + steps):
        commands += there.wait(step_s)
        commands += there.send(m.Heartbeat("a", spec.id, {member.worker: step for member in spec.members}))
    return commands


def test_a_generation_is_told_once() -> None:
    there, spec = started()
    commands = train(there, spec, 400, 1.0, 4)
    (alert,) = told(commands)
    assert alert.level == "info"
    assert alert.data["measured_s"] == pytest.approx(1.0, rel=0.1)
    assert alert.data["ratio"] == pytest.approx(alert.data["measured_s"] / alert.data["predicted_s"])
    assert alert.text.startswith(f"a step takes {alert.data['measured_s']:.3g} s, ")
    assert alert.data["layout"] == str(spec.layout)


def test_a_drift_is_a_warning() -> None:
    there, spec = started()
    train(there, spec, 60, 1.0, 4)
    slow = told(train(there, spec, 200, 3.0, 64))
    assert [alert.level for alert in slow][:1] == ["warning"]
    assert "look for a slow device" in slow[0].text
    assert slow[0].data["ratio"] > 1.5 * 1.0 / slow[0].data["predicted_s"]


def test_getting_faster_is_no_warning() -> None:
    there, spec = started()
    train(there, spec, 60, 3.0, 4)
    assert {alert.level for alert in told(train(there, spec, 400, 1.0, 64))} == {"info"}


def test_nothing_is_told_of_the_first_window() -> None:
    """Its steps take ten times as long, and do not count."""
    there, spec = started()
    assert told(train(there, spec, 10, 10.0, 4)) == []
    (alert,) = told(train(there, spec, 30, 1.0, 14))
    assert alert.data["measured_s"] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("step", "now", "expected"), [(30, 110.0, 0.5), (29, 150.0, None), (30, 109.0, None), (30, 150.0, 2.5)]
)
def test_a_window_needs_steps_and_time(step: int, now: float, expected: float | None) -> None:
    assert StepWindow((1, 1), 10, 100.0, steps=20).measured_s(step, now) == expected


def test_the_window_that_counts_for_nothing_needs_no_time() -> None:
    """Seen: a run of 60 steps in 19 seconds left no measure, since ten of them went into that window."""
    assert StepWindow((1, 1), 10, 100.0).measured_s(20, 103.0) == pytest.approx(0.3)
    assert StepWindow((1, 1), 10, 100.0).measured_s(19, 130.0) is None


def test_windows_double() -> None:
    window: Any = StepWindow((1, 1), 10, 100.0).after(20, 110.0, 2.0)
    assert (window.steps, window.step, window.at, window.ratio) == (20, 20, 110.0, 2.0)


def test_no_estimate_no_ratio() -> None:
    assert ratio_of(1.0, 0.5) == 2.0
    assert ratio_of(1.0, float("inf")) is ratio_of(1.0, 0.0) is None
    assert not drifted(0.0, 9.0)
