"""Simulation of runs that go back to a state which turns out damaged, and of launches that ask for it again.

Half of the seeds rewind for a bad step, half are told to by ``checkpoint.resume_step``. Of the commits that
they go back to some are found damaged by the workers. All processes and nodes end now and then, and the run
is launched again with the same config; or without the step, where it ended for want of that commit. Nothing
that was committed may be given up for it.
"""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, coordinator
from picotron_ray.coordinator.simulator.repetition import RESUME_STEP, old_commits
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import EVENTS, FAMILIES, LIMIT_S, Report, draw_job
from picotron_ray.coordinator.simulator.shell import Shell
from picotron_ray.coordinator.simulator.world import Sim

BAD_STEP = 41
MOST_DAMAGED = 3
DAMAGED = 0.5  # share of the commits gone back to that are
WORKERS = 4


class _StoreShell(Shell):
    """Coordinator that storage tells which commits are known to be damaged when its term begins."""

    def read_log(self) -> tuple[tuple[m.Commit, ...], tuple[m.GenerationSpec, ...]]:
        commits, generations = super().read_log()
        bad = self.sim.bad_manifests
        return tuple(replace(each, damaged=each.manifest in bad) for each in commits), generations


class LostTargets(Sim):
    """Run whose commits are found damaged as it goes back to them, as long as there are others."""

    shell_class = _StoreShell

    def unreadable(self, source: m.Source) -> str:
        able = source.kind == "commit" and self.struck.count("damaged") < MOST_DAMAGED
        if able and self._is_back(source) and self.rng.chance(DAMAGED):
            self.bad_manifests.add(source.manifest)
            self._note("damaged")
        return super().unreadable(source)

    def _is_back(self, source: m.Source) -> bool:
        """Whether the history that ends in a state's writer has a newer commit that is good."""
        if source.manifest in self.bad_manifests:
            return False
        good = [c for c in self.storage.commits() if c.manifest not in self.bad_manifests]
        writer = self.checks.specs.get(source.generation) if source.generation else None
        return any(c.step > source.step and self.checks.counts(writer, c.generation, c.step) for c in good)

    def relaunch(self) -> None:
        """End all processes and nodes of the run, and launch it again on others."""
        if self.over:
            return
        self._note("relaunch")
        gone = list(self.nodes.values())
        if self.shell is not None:
            self.shell.die()
        self.shell = None
        for node in gone:
            self.remove_node(node, told=True)
            self.after(self.rng.uniform(1.0, 2.0), self.add_node, node.capacity)
        self.after(0.5, coordinator, self)

    def _note(self, name: str) -> None:
        self.struck.append(name)
        self.struck_at, self.quiet_at = self.now, max(self.quiet_at, self.now + LONGEST_S)


def simulate_lost_target(seed: int) -> Report:
    """Run one seed; the same seed gives the same report, event for event."""
    draw, by_user = Rng(seed), seed % 2 == 1
    nodes, interval = 1 + draw.below(3), 3 + draw.below(5)
    job = draw_job(WORKERS, interval, rewind=not by_user, resume_step=RESUME_STEP if by_user else None)
    checks = Checks(Coverage())
    sim = LostTargets(draw.bits(), job, FAMILIES[draw.below(4)], checks)
    checks.sim = sim
    sim.bad_step = 0 if by_user else BAD_STEP
    sim.step_s = EVENTS / (nodes + 1) / job.steps
    for _ in range(nodes):
        sim.add_node(-(-WORKERS // nodes))
    if by_user:
        old_commits(sim, checks)
        checks.excused = "storage"
    coordinator(sim)
    for _ in range(draw.below(4)):
        sim.after(draw.uniform(3.0, 70.0) * sim.step_s, sim.relaunch)
    for name in ("kill", draw.pick(("kill", "node", "restart", "head"))):
        sim.after(6.0 + draw.uniform(0.0, 60.0) * sim.step_s, _strike, sim, name)
    sim.quiet_at = sim.step_s * job.steps + LONGEST_S
    limit_s = LIMIT_S + 2 * job.steps * sim.step_s
    sim.run(limit_s)
    if not sim.failures and _ended_for_want(sim):
        _launch_without(sim, checks, interval)
        sim.run(limit_s)
    checks.log()
    return Report(seed, sim.events, tuple(sim.struck), len(checks.specs), sim.now, tuple(sim.failures))


def _strike(sim: LostTargets, name: str) -> None:
    if not sim.over:
        sim.struck.append(name)
        sim.struck_at = sim.now
        FAULTS[name](sim)


def _ended_for_want(sim: LostTargets) -> bool:
    """Whether the run ended because the commit that was asked for is damaged."""
    end = None if sim.shell is None else sim.shell.finished
    if end is None or end.status != "storage":
        return False
    lost = [c for c in sim.storage.commits() if c.step == RESUME_STEP]
    if "asks for, is damaged" not in end.detail or any(c.manifest not in sim.bad_manifests for c in lost):
        sim.violation(f"the run ended as storage: {end.detail}")
    return not sim.failures


def _launch_without(sim: LostTargets, checks: Checks, interval: int) -> None:
    """Launch the run again as its last line said: without the step that is damaged."""
    sim.struck.append("without")
    checks.excused = ""
    gone = list(sim.nodes.values())
    assert sim.shell is not None
    sim.shell.die()
    sim.restart_clock()
    sim.nodes.clear()
    sim.job = draw_job(WORKERS, interval)
    for node in gone:
        sim.add_node(node.capacity)
    sim.quiet_at = sim.now
    coordinator(sim)
