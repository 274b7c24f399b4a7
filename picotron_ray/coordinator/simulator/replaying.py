"""Simulated coordinator whose events are kept, so that they can be replayed as an event log would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.plan_book import Default
from picotron_ray.coordinator.replay import QuietHeartbeats
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.run import Report
from picotron_ray.coordinator.simulator.shell import Shell
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState


class ReplayingShell(Shell):
    """One incarnation of the coordinator, with all that it heard and said."""

    def __init__(self, sim: Sim, default: Default) -> None:
        super().__init__(sim)
        self._default = default
        self.machine = Machine(sim.job, default=default)
        self.heard_events: list[tuple[float, m.Event, float, bool, list[m.Command]]] = []
        self._handle = self.machine.handle
        self.machine.handle = self._kept  # type: ignore[method-assign]

    def judged(self, before: MachineState, commands: list[m.Command]) -> None:
        """Check what follows from one event; a kind of its own knows more.

        Args:
            before: state of the machine before the event.
        """

    def _kept(self, event: m.Event, now: float, slept_s: float | None = None) -> list[m.Command]:
        before = self.machine.memory.state
        commands = self._handle(event, now, slept_s)
        told = now, event, self.machine.slept_s, self.machine.eventful, commands
        self.heard_events.append(told)
        self.judged(before, commands)
        return commands

    def replays(self) -> str:
        """Replay the events, quiet heartbeats folded as the event log does; returns the first difference."""
        machine, quiet = Machine(self.sim.job, default=self._default), QuietHeartbeats()
        for now, event, slept_s, eventful, commands in self.heard_events:
            if not eventful:
                quiet.add(now, event)
                continue
            beats = [(at, m.Heartbeat(node, _read(of), {"": step})) for at, node, of, step in quiet.take()]
            machine.absorb(beats)
            if machine.handle(event, now, slept_s) != commands:
                return f"term {self.term}: {event} at {now:.3f} s replays otherwise"
        return ""


def _read(generation: Any) -> m.GenerationId | None:
    found = plain(generation)
    return None if found is None else m.GenerationId(**found)


def run_out(sim: Sim, shells: Sequence[ReplayingShell], checks: Checks, seed: int, limit_s: float) -> Report:
    """Run a cluster to its end; judge its log, and that each of its shells replays."""
    sim.run(limit_s)
    checks.log()
    for shell in shells:
        if difference := shell.replays():
            sim.violation(difference)
    return Report(seed, sim.events, tuple(sim.struck), len(checks.specs), sim.now, tuple(sim.failures))
