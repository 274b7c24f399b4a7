"""Simulation of a run that people stop: all members held at a boundary, debuggers attached, beside faults.

A hold is no part of a step's time, at no moment. One that was told has an end, told before the run's own, and
as long as it was, where every node and the coordinator were heard all the time. And the run still ends with
every step done once.
"""

from __future__ import annotations

from collections.abc import Sequence

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.plan_book import Choose
from picotron_ray.coordinator.policies.pace import HELD
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, coordinator, plan
from picotron_ray.coordinator.simulator.planning import default
from picotron_ray.coordinator.simulator.replaying import ReplayingShell, run_out
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import EVENTS, FAMILIES, LIMIT_S, Report, draw_job
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState

LONGEST_HOLD_S, LONGEST_DEBUG_S = 40.0, 20.0
BEATS_S = 4.0  # from what happens until heartbeats of all nodes have told it
HEARD = {
    "hold",
    "debugger",
    "kill",
    "hang",
    "error",
    "corrupt",
    "planner",
    "request",
    "stop",
    "outage",
    "lag",
}
"""Whatever else strikes, the coordinator may hear of a begin or an end late, or not at all."""


class HeldSim(Sim):
    """Run that people hold and debug."""

    def __init__(self, seed: int, job: JobConfig, choose: Choose, checks: Checks) -> None:
        super().__init__(seed, job, choose, checks)
        self.shell_class = HeldShell
        self.shells: list[HeldShell] = []
        self.wanted_s = 0.0  # of a hold, from the next boundary on
        self.told = 0  # holds that were told

    def hold_s(self) -> float:
        seconds, self.wanted_s = self.wanted_s, 0.0
        self.quiet_at = max(self.quiet_at, self.now + seconds)
        self.struck_at = max(self.struck_at, self.now + seconds)  # it may stay in its state so long
        return seconds


class HeldShell(ReplayingShell):
    """Coordinator whose alerts and measurements are judged."""

    sim: HeldSim

    def __init__(self, sim: HeldSim) -> None:
        super().__init__(sim, default)
        sim.shells.append(self)
        self.open = False  # a hold was told, and not its end

    def judged(self, before: MachineState, commands: Sequence[m.Command]) -> None:
        memory = self.machine.memory
        if memory.in_generation and memory.step_s < 0:
            self.sim.violation(f"a step takes {memory.step_s:g} s")
        if memory.pace.at > memory.now:
            self.sim.violation("steps are measured from a time that has yet to come")
        for command in commands:
            if isinstance(command, m.Alert) and command.kind == HELD:
                self._told(command)
            elif isinstance(command, m.Finish) and self.open:
                self.sim.violation("the run ends, and a hold of it does not")
        if self.open and memory.hold is None:
            self.sim.violation("a hold was told, and forgotten without a word")

    def _told(self, alert: m.Alert) -> None:
        if alert.data["held"] == self.open:
            self.sim.violation(f"the same of a hold is told twice: {alert.text}")
        self.open = alert.data["held"]
        self.sim.told += self.open
        spec = self.machine.memory.spec
        if self.open or spec is None or not HEARD.issuperset(self.sim.struck):
            return
        newest_s = self.sim.generations[spec.id].newest_holds_s  # another one may have begun since
        if all(abs(alert.data["held_s"] - held_s) > BEATS_S for held_s in newest_s):
            self.sim.violation(f"{alert.text}: it was {newest_s[-1]:.1f} s")


def simulate_held(seed: int, coverage: Coverage | None = None) -> tuple[Report, int]:
    """Run one seed; the same seed gives the same report, event for event; and how many holds were told."""
    draw = Rng(seed)
    nodes, capacity = 1 + draw.below(3), 1 + draw.below(3)
    workers = max(2, min(nodes * capacity, 2 + draw.below(4)))
    job = draw_job(workers, 5 + draw.below(10))
    checks = Checks(Coverage() if coverage is None else coverage)
    sim = HeldSim(draw.bits(), job, FAMILIES[draw.below(len(FAMILIES))], checks)
    checks.sim = sim
    sim.step_s = EVENTS / (nodes + 1) / job.steps
    for _ in range(nodes):
        sim.add_node(max(capacity, -(-workers // nodes)))
    coordinator(sim)
    last = 0.0
    for _ in range(2 + draw.below(4)):
        last += draw.uniform(2.0, 30.0)
        sim.after(last, _hold if draw.chance(0.6) else _debug, sim)
    strikes = plan(sim, draw.below(4)) if draw.chance(0.7) else []
    for at, name in strikes:
        sim.after(at, _strike, sim, name)
    sim.quiet_at = max([last, *(at for at, _ in strikes)]) + LONGEST_S
    return run_out(sim, sim.shells, checks, seed, LIMIT_S + 2 * job.steps * sim.step_s), sim.told


def _hold(sim: HeldSim) -> None:
    """Have all members stay at the next boundary; sometimes for a moment, as a recording does."""
    sim.struck.append("hold")
    sim.wanted_s = sim.rng.uniform(0.2, 3.0) if sim.rng.chance(0.3) else sim.rng.uniform(3.0, LONGEST_HOLD_S)


def _debug(sim: HeldSim) -> None:
    """Attach a debugger to a worker; now and then all members are held meanwhile."""
    sim.struck.append("debugger")
    if names := [name for node in sim.nodes.values() for name in node.workers]:
        name = sim.rng.pick(names)
        sim.debugged.add(name)
        sim.after(sim.rng.uniform(1.0, LONGEST_DEBUG_S), sim.debugged.discard, name)
        if sim.rng.chance(0.5):
            sim.after(sim.rng.uniform(0.0, 5.0), _hold, sim)


def _strike(sim: HeldSim, name: str) -> None:
    sim.struck.append(name)
    sim.struck_at = max(sim.struck_at, sim.now)
    sim.quiet_at = max(sim.quiet_at, sim.now + LONGEST_S)
    FAULTS[name](sim)
