"""Logs without ticks and heartbeats that nothing follows from: they replay, and do not grow with time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.plan_book import Default, no_default
from picotron_ray.coordinator.replay import QuietHeartbeats, event_line, header_line, replay, seal, unseal
from picotron_ray.coordinator.simulator import shell
from picotron_ray.coordinator.simulator.run import simulate
from tests.support.runs.coordinator_world import World, choose_dp, job


class RecordedMachine(Machine):
    """A machine that writes its log as the coordinator does."""

    def __init__(self, config: Any, choose: Any = None, default: Default = no_default) -> None:
        super().__init__(config, choose, default)
        self.config, self.choose, self.default = config, choose, default
        self.lines: list[str] = []
        self.handled, self.quiet = 0, QuietHeartbeats()
        MACHINES.append(self)

    def handle(self, event: m.Event, now: float, slept_s: float | None = None) -> list[m.Command]:
        commands = super().handle(event, now, slept_s)
        self.handled += 1
        if self.eventful:
            heard = self.quiet.take()
            more = {"heard": heard} if heard else {}
            self.lines.append(seal(event_line(now, event, commands, slept=self.slept_s, **more)))
        else:
            self.quiet.add(now, event)
        return commands

    def replayed(self) -> Any:
        facts = {} if self.choose else {"answers": "events"}
        lines = [header_line(self.config, facts), *self.lines]
        return replay(lines, lambda *_: (self.choose, self.default))


MACHINES: list[RecordedMachine] = []


def test_every_simulated_run_replays_without_what_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "Machine", RecordedMachine)
    lines = handled = 0
    for seed in range(12):
        MACHINES.clear()
        simulate(seed)
        for machine in MACHINES:
            if machine.lines:
                found = machine.replayed()
                assert (seed, found.difference) == (seed, None)
                assert found.events == len(machine.lines)
            lines, handled = lines + len(machine.lines), handled + machine.handled
    assert lines < 0.7 * handled


def test_an_hour_in_which_nothing_happens_takes_two_lines() -> None:
    """One of them is where the first window of steps ends (`policies.calibration`)."""
    world = World()
    world.machine = machine = RecordedMachine(world.config, choose_dp)
    spec = world.up(("a", 2), ("b", 2))
    world.log_appends()
    world.now += 1.0
    for node, worker in (("a", spec.members[0].worker), ("b", spec.members[2].worker)):
        world.send(m.Heartbeat(node, spec.id, {worker: 1}, world.living(node)))
    before = len(machine.lines)
    for _ in range(3600):
        world.now += 0.5
        step = int(world.now)
        steps = {"a": {spec.members[0].worker: step}, "b": {}}
        world.send(*(m.Heartbeat(node, spec.id, at, world.living(node)) for node, at in steps.items()))
        world.now += 0.5
        world.send(m.Tick())
        if step == 90:
            machine.memory.job = job(steps=10**6)
    assert len(machine.lines) <= before + 2
    world.send(m.UserRequest("checkpoint"))
    newest = json.loads(unseal(machine.lines[-1]) or "")
    assert {node: step > 3000 for _, node, _, step in newest["heard"]} == {"a": True, "b": False}


def test_the_coordinators_own_sleep_is_replayed() -> None:
    """Without the ticks in between, a replay could not tell a quiet minute from a minute asleep."""
    world = World()
    world.machine = machine = RecordedMachine(world.config, choose_dp)
    world.up(("a", 4))
    world.wait(30.0)
    world.now += 300.0  # asleep: the node is not lost
    world.send(m.Tick())
    world.wait(3.0)
    world.wait(20.0, beat=False)
    assert machine.slept_s == pytest.approx(298.0)
    assert world.machine.view.nodes == (), "silent for long enough by now"
    assert machine.replayed().difference is None


@pytest.mark.parametrize("torn", [lambda line: line[:30], lambda line: line[:-1] + "x", lambda line: ""])
def test_a_torn_line_is_known(torn: Any) -> None:
    line = event_line(1.0, m.Tick(), [])
    assert unseal(seal(line)) == line
    assert unseal(line) == line, "of an older log"
    assert not unseal(torn(seal(line)))


def test_a_heartbeat_that_came_late_takes_no_steps_back() -> None:
    """A replay had fewer steps seen than the run where the newest one told fewer than the one before it."""
    quiet, first, second = QuietHeartbeats(), m.GenerationId(1, 1), m.GenerationId(1, 2)
    for at, generation, step in ((1.0, first, 16), (2.0, first, 14)):
        quiet.add(at, m.Heartbeat("a", generation, {"w1": step}))
    assert [[at, most] for at, _, _, most in quiet.take()] == [[2.0, 16]]
    for at, generation, step in ((3.0, first, 16), (4.0, second, 3)):
        quiet.add(at, m.Heartbeat("a", generation, {"w1": step}))
    assert [[at, most] for at, _, _, most in quiet.take()] == [[4.0, 3]]
