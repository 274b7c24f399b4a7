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
    there.send(m.UserRequest("stop"))
    there.send(m.Tick())
    assert there.machine.memory.state is MachineState.LEAVING
    assert [alert.data["held"] for alert in beat(there, spec, 3, held=True)] == [False]
    replays(there)


def test_a_new_generation_begins_without_holds_and_debuggers() -> None:
    there = World()
    spec = there.up(("a", 4))
    beat(there, spec, 3, held=True, debugged=spec.members[0].worker)
    assert there.machine.memory.debugged
    lose(there, spec)
    there.wait(1.0)
    assert there.machine.memory.spec.id != spec.id
    assert (there.machine.memory.hold, there.machine.memory.debugged) == (None, frozenset())
