"""Stops that a person makes: told with their end, and no part of what is measured of a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.holds import TOLD_AFTER_S
from picotron_ray.coordinator.states import MachineState
from tests.pure.coordinator.test_folded_logs import RecordedMachine
from tests.pure.coordinator.test_planning import lose, running, world
from tests.support.runs.coordinator_world import World, of


def started(nodes: Sequence[tuple[str, int]] = (("a", 4),)) -> tuple[World, m.GenerationSpec]:
    """Workers, three steps on, whose machine writes a log."""
    there = world(steps=100_000)
    there.machine = RecordedMachine(there.config, there.choose)
    spec, _ = running(there, *nodes)
    return there, spec


def beat(
    there: World,
    spec: m.GenerationSpec,
    step: int,
    *,
    node: str = "a",
    held: bool = False,
    debugged: str = "",
) -> list[m.Alert]:
    """A heartbeat of a node, a second after whatever was before; returns what is told of stops."""
    steps = {member.worker: step for member in spec.members if member.node == node}
    there.wait(1.0, beat=False)
    told = there.send(m.Heartbeat(node, spec.id, steps, held=held, debugged=(debugged,) if debugged else ()))
    return [alert for alert in of(told, m.Alert) if alert.kind in ("held", "debugger")]


def replays(there: World) -> None:
    assert isinstance(there.machine, RecordedMachine)
    assert there.machine.replayed().difference is None


def test_a_hold_that_lasts_is_told_once_and_so_is_its_end() -> None:
    there, spec = started()
    beat(there, spec, 4)
    told = [alert for _ in range(30) for alert in beat(there, spec, 4, held=True)]
    assert [(alert.level, alert.data) for alert in told] == [("warning", {"step": 4, "held": True})]
    assert told[0].text.startswith("all ranks are held after step 4: `picotron-ray debug ls ")
    (over,) = beat(there, spec, 5)
    assert over.text == "the run goes on after it was held for 30 s after step 4"
    assert beat(there, spec, 6) == []
    replays(there)


def test_a_recording_that_is_saved_is_no_news() -> None:
    there, spec = started()
    assert not [alert for _ in range(int(TOLD_AFTER_S)) for alert in beat(there, spec, 3, held=True)]
    assert beat(there, spec, 4) == []


def test_its_seconds_are_no_steps() -> None:
    """Seen: a stop at a breakpoint made a step's time that of a slow machine, and a warning of it."""
    there, spec = started()
    for step in range(4, 64):
        beat(there, spec, step)
    pace_s = there.machine.memory.step_s
    for _ in range(3600):
        beat(there, spec, 63, held=True)
    alerts = []
    for step in range(64, 200):
        there.wait(1.0, beat=False)
        steps = {member.worker: step for member in spec.members}
        alerts += of(there.send(m.Heartbeat("a", spec.id, steps)), m.Alert)
    assert [alert for alert in alerts if alert.kind == "calibration"] == []
    assert there.machine.memory.step_s == pytest.approx(pace_s, rel=0.1)
    replays(there)


def test_nodes_that_tell_of_the_same_hold_one_after_the_other() -> None:
    """The heartbeat of another node that is still held is no second hold."""
    there, spec = started((("a", 2), ("b", 2)))
    told = []
    for _ in range(10):
        told += beat(there, spec, 3, held=True)
        told += beat(there, spec, 3, node="b", held=True)
    assert [alert.data["held"] for alert in told] == [True]
    assert [alert.data["held"] for alert in beat(there, spec, 4)] == [False]
    assert beat(there, spec, 3, node="b", held=True) == []
    assert there.machine.memory.hold is None
    replays(there)


def test_a_debugger_is_told_and_nothing_is_measured_beside_it() -> None:
    there, spec = started()
    worker = spec.members[2].worker
    (told,) = beat(there, spec, 4, debugged=worker)
    assert told.text == f"a debugger is attached to rank 2 ({worker}): where it stops, all wait for it"
    assert not [alert for _ in range(100) for alert in beat(there, spec, 4, debugged=worker)]
    (gone,) = beat(there, spec, 5)
    assert gone.text == f"no debugger is attached to rank 2 ({worker}) any more"
    for step in range(6, 40):
        beat(there, spec, step)
    assert there.machine.memory.step_s == pytest.approx(1.0, rel=0.1)
    replays(there)


def test_a_hold_that_a_stop_ends_is_told_to_be_over() -> None:
    there, spec = started()
    for _ in range(10):
        beat(there, spec, 3, held=True)
    told = [*there.send(m.UserRequest("stop")), *there.send(m.Tick())]
    assert there.machine.memory.state is MachineState.LEAVING
    assert [alert.data["held"] for alert in of(told, m.Alert) if alert.kind == "held"] == [False]
    assert beat(there, spec, 3, held=True) == []
    replays(there)


def test_a_new_generation_begins_without_holds_and_debuggers() -> None:
    there = World()
    spec = there.up(("a", 4))
    beat(there, spec, 3, held=True, debugged=spec.members[0].worker)
    assert there.machine.memory.debugged
    lose(there, spec)
    there.wait(1.0)
    assert there.machine.memory.spec is not None
    assert there.machine.memory.spec.id != spec.id
    assert (there.machine.memory.hold, there.machine.memory.debugged) == (None, frozenset())


def hold_ends(commands: Sequence[m.Command]) -> list[float]:
    """Seconds of each hold whose end is among what was told."""
    alerts = [command for command in commands if isinstance(command, m.Alert) and command.kind == "held"]
    return [alert.data["held_s"] for alert in alerts if not alert.data["held"]]


def test_a_hold_ends_with_its_generation_though_nobody_says_so() -> None:
    """A told hold was forgotten where the next generation began before another heartbeat."""
    there, spec = started()
    for _ in range(10):
        beat(there, spec, 3, held=True)
    before = len(there.log)
    lose(there, spec)
    assert hold_ends(there.log[before:]) == [pytest.approx(9.0)]


def test_a_hold_ends_before_the_run_does() -> None:
    there, spec = started()
    for _ in range(10):
        beat(there, spec, 3, held=True)
    memory = there.machine.memory
    memory.out = []
    memory.finish("failed", "as a test wants it")
    assert hold_ends(memory.out) == [pytest.approx(9.0)]
    assert isinstance(memory.out[-1], m.Finish)


def test_while_a_hold_lasts_its_seconds_are_no_steps() -> None:
    """The time of a step grew with each second of a hold, and with it what a stop was given."""
    there, spec = started()
    for step in range(4, 64):
        beat(there, spec, step)
    pace_s = there.machine.memory.step_s
    for _ in range(600):
        beat(there, spec, 63, held=True)
    assert there.machine.memory.step_s == pytest.approx(pace_s, rel=0.05)
    replays(there)


def steps_until_the_limit(hold: range) -> float:
    """Seconds that a launch of half an hour has left when its limit stops it; a step takes 20 s.

    Args:
        hold: seconds of the launch at which all ranks are held.
    """
    there = world(steps=100_000)
    begin = there.begin
    there.begin = lambda *nodes, **more: begin(*nodes, left_s=1800.0, limit="cluster.max_wall_s", **more)  # type: ignore[method-assign]
    spec, _ = running(there, ("a", 4))
    step = 3
    while there.now < 1800.0:
        held = int(there.now) in hold
        step += not held and there.now % 20 < 1
        before = len(there.log)
        beat(there, spec, step, held=held)
        there.send(m.Tick())
        if any(alert.kind == "limit" for alert in of(there.log[before:], m.Alert)):
            return 1800.0 - there.now
    raise AssertionError("the limit stopped nothing")


def test_a_hold_makes_no_limit_stop_the_run_early() -> None:
    """A run that was held when its launch had minutes left was stopped for good, with minutes to spare."""
    free_s = steps_until_the_limit(range(0))
    assert steps_until_the_limit(range(900, 1800)) == pytest.approx(free_s, abs=25.0)


def test_what_began_within_a_hold_loses_no_more_than_its_part_of_it() -> None:
    """A debugger that went while all ranks were held began the measurement anew: its begin moved past now."""
    there, spec = started((("a", 2), ("b", 2)))
    worker = next(member.worker for member in spec.members if member.node == "b")
    for step in range(4, 20):
        beat(there, spec, step)
        beat(there, spec, step, node="b", debugged=worker)
    for _ in range(6):
        beat(there, spec, 20, held=True)
    for _ in range(30):
        beat(there, spec, 20, node="b", held=True)
        beat(there, spec, 20, held=True)
        assert there.machine.memory.step_s >= 0
    for step in range(21, 30):
        beat(there, spec, step)
        beat(there, spec, step, node="b")
        assert there.machine.memory.step_s >= 0
        assert there.machine.memory.pace.at <= there.machine.memory.now
    assert there.machine.memory.step_s == pytest.approx(2.0, rel=0.3)
    replays(there)


def test_a_hold_whose_node_falls_silent_ends_when_another_goes_on() -> None:
    """Only the node that showed it first could end it before the next step, which may take minutes."""
    there, spec = started((("a", 2), ("b", 2)))
    for _ in range(2):
        beat(there, spec, 4, node="b", held=True)
        beat(there, spec, 4, held=True)
    assert hold_ends([alert for _ in range(60) for alert in beat(there, spec, 4)]) == [pytest.approx(2.0)]
    assert there.machine.memory.hold is None
    assert there.machine.memory.step_s > 10
    replays(there)


def test_a_hold_whose_node_falls_silent_lasts_where_another_shows_it() -> None:
    there, spec = started((("a", 2), ("b", 2)))
    told = [*beat(there, spec, 4, node="b", held=True)]
    for _ in range(30):
        told += beat(there, spec, 4, held=True)
    assert [alert.data["held"] for alert in told] == [True]
    assert hold_ends(beat(there, spec, 4)) == [pytest.approx(31.0)]
    replays(there)


def test_a_hold_that_an_earlier_term_told_is_told_to_be_over() -> None:
    """The coordinator came back as it ended: what was told of it had no end."""
    there, spec = started()
    for _ in range(10):
        beat(there, spec, 9, held=True)
    there.machine = RecordedMachine(there.config, there.choose)
    there.send(m.Begin(2, generations=(spec,), running=spec, workers=spec.members), m.NodeJoined("a", 4))
    told = [*beat(there, spec, 9, held=True), *beat(there, spec, 9), *beat(there, spec, 10)]
    assert [alert.data["held"] for alert in told] == [True, False]
    assert beat(there, spec, 10, held=True) == [], "one of its own is told once it lasts"
    replays(there)
