"""Simulation of a run with operators: pauses, new sizes, drains, a time limit, beside faults as ever.

Orders come at any time, also in a recovery, while a coordinator is away, twice, or without effect. One that
was accepted must hold for all later coordinators; nobody computes in a pause, nor beyond the wanted size, nor
on a node that was sent away; and the run still ends with every step done once.
"""

from __future__ import annotations

from collections.abc import Sequence

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.plan_book import Choose
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, coordinator, plan
from picotron_ray.coordinator.simulator.planning import default
from picotron_ray.coordinator.simulator.protocols import GenerationProtocol
from picotron_ray.coordinator.simulator.replaying import ReplayingShell, run_out
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import EVENTS, FAMILIES, LIMIT_S, Report, draw_job
from picotron_ray.coordinator.simulator.standing import Standing
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState

RESUMED_AGAIN_S = 5.0  # until whoever resumes asks again, where no coordinator has answered
LIMITED = 0.2  # share of runs with a time limit
KINDS = ("pause", "pause", "resize", "resize", "drain", "resume", "checkpoint")


class OperatedSim(Sim):
    """Run that operators give orders to."""

    def __init__(self, seed: int, job: JobConfig, choose: Choose, checks: Checks) -> None:
        super().__init__(seed, job, choose, checks)
        self.shell_class = OperatedShell
        self.shells: list[OperatedShell] = []
        self.checks_of = checks
        self.standing = Standing(self)

    @property
    def most_workers(self) -> int:
        return self.standing.most or self.job.cluster.max_workers

    def stepped(self, generation: GenerationProtocol) -> None:
        super().stepped(generation)
        self.standing.stepped()


class OperatedShell(ReplayingShell):
    """Coordinator whose record remembers orders."""

    sim: OperatedSim

    def __init__(self, sim: OperatedSim) -> None:
        super().__init__(sim, default)
        sim.shells.append(self)
        self.remembered = sim.standing.past

    def judged(self, before: MachineState, commands: Sequence[m.Command]) -> None:
        if self.term == self.sim.storage.term and self.sim.shell is self:  # else its record is read no more
            self.sim.standing.judged(self, before, commands)

    def deliver(self, event: m.Event) -> None:
        super().deliver(event)
        if isinstance(event, m.Tick) and self.sim.shell is self and self.machine.memory.term:
            self.sim.standing.ticked(self)

    def finish(self, command: m.Finish) -> None:
        if self.sim.shell is self:
            self.sim.standing.ended(command)
        super().finish(command)


def simulate_operated(seed: int, coverage: Coverage | None = None) -> tuple[Report, Standing]:
    """Run one seed; the same seed gives the same report, event for event."""
    draw = Rng(seed)
    nodes, capacity = 2 + draw.below(2), 1 + draw.below(3)
    job = draw_job(max(2, min(nodes * capacity, 2 + draw.below(4))), 5 + draw.below(10))
    checks = Checks(Coverage() if coverage is None else coverage)
    sim = OperatedSim(draw.bits(), job, FAMILIES[draw.below(len(FAMILIES))], checks)
    checks.sim = sim
    sim.step_s = EVENTS / (nodes + 1) / job.steps
    for _ in range(nodes):
        sim.add_node(capacity)
    coordinator(sim)
    last = 0.0
    for _ in range(2 + draw.below(5)):
        last += draw.uniform(0.05, 3.0) if draw.chance(0.3) else draw.uniform(2.0, 20.0)
        sim.after(last, _operate, sim, draw.pick(KINDS))
    strikes = [one for one in plan(sim, draw.below(4)) if one[1] != "stop"]
    for at, name in strikes:
        sim.after(at, _strike, sim, name)
    sim.quiet_at = max([last, *(at for at, _ in strikes)]) + LONGEST_S
    if draw.chance(LIMITED):
        sim.standing.limit_at, sim.stop_asked = draw.uniform(60.0, 120.0), True
    return run_out(sim, sim.shells, checks, seed, LIMIT_S + 2 * job.steps * sim.step_s), sim.standing


def _operate(sim: OperatedSim, kind: str) -> None:
    """Give one order, sometimes twice."""
    sim.struck.append(kind)
    sim.struck_at = sim.now
    if kind == "checkpoint":
        sim.tell(m.UserRequest("checkpoint"))
        return
    for _ in range(1 + sim.rng.chance(0.2)):
        sim.tell(_order(sim, kind))
    if kind == "pause":
        _later(sim, sim.rng.uniform(0.1, 25.0), "resume")
    elif kind == "drain":  # whoever sends a node away brings another
        sim.after(sim.rng.uniform(1.0, 15.0), sim.add_node, 1 + sim.rng.below(3))


def _order(sim: OperatedSim, kind: str) -> m.Order:
    if kind == "resize":
        most = 1 + sim.rng.below(sim.job.cluster.max_workers + 2)
        return m.Order("resize", min_workers=sim.rng.below(3), max_workers=most)
    if kind == "drain":
        node = sim.rng.pick([*sim.nodes, "nobody"])
        return m.Order("drain", node=node, left_s=sim.rng.pick((0.0, 5.0, 30.0)))
    return m.Order("pause" if kind == "pause" else "resume")


def _later(sim: OperatedSim, seconds: float, kind: str) -> None:
    sim.quiet_at = max(sim.quiet_at, sim.now + seconds + LONGEST_S)
    sim.after(seconds, _resume, sim)


def _resume(sim: OperatedSim) -> None:
    """Resume, and ask again until a coordinator has answered."""
    sim.struck_at = sim.now
    sim.tell(m.Order("resume"))
    if sim.standing.paused and not sim.over:
        _later(sim, RESUMED_AGAIN_S, "resume")


def _strike(sim: OperatedSim, name: str) -> None:
    sim.struck.append(name)
    sim.struck_at = sim.now
    sim.quiet_at = max(sim.quiet_at, sim.now + LONGEST_S)
    FAULTS[name](sim)
