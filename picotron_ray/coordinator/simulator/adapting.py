"""Simulation of a run that adapts: slow workers, slow stages and a bad layout show in its figures.

A worker may be slow for as long as it lives, a setting may hurt although the cost model likes it, and the
figures are noisy. Faults strike as ever. Decisions must come in healthy generations alone, be few, keep the
batch, and replay. What was kept stays, what hurt is not tried again, and no setting comes without permission,
also where the coordinator dies at any stage of a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from picotron_ray.config.schema.adapt import AdaptKind
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation import ADAPT
from picotron_ray.coordinator.simulator.changes import Changes
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, coordinator, plan
from picotron_ray.coordinator.simulator.replaying import ReplayingShell
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import LIMIT_S, Report
from picotron_ray.coordinator.simulator.training import SimGeneration
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.rebalance import step_s_by_speed

BATCH = 24
STEPS = 240
ROW_S = 0.02
REPORT_S = 3.0
MOST_CHANGES = 30
"""Changes of one run, taken back ones included: the budget of an hour, and what failures take back."""
KINDS: tuple[AdaptKind, ...] = ("micro-batch", "rows", "stages", "layout", "bucket", "schedule", "recompute")


def draw_job(workers: int) -> JobConfig:
    """A job that begins in a bad layout and may leave it."""
    return JobConfig.model_validate(
        {
            "steps": STEPS,
            "data": {"global_batch": BATCH},
            "layout": {"pp": 2, "tp": 1, "zero": 0, "micro_batch": 4},
            "comm": {"bucket_mib": 1.0},
            "adapt": {"apply": KINDS, "interval_s": REPORT_S, "budget": 12, "settle_steps": 4},
            "cluster": {"max_workers": workers, "start_timeout_s": 60},
            "elastic": {
                "max_failures": 1000,
                "max_failures_without_progress": 20,
                "first_step_timeout_s": 15,
            },
            "checkpoint": {"interval_steps": 20, "keep_last": 2, "gc_grace_s": 15},
            "storage": {"retry_deadline_s": 5},
        }
    )


@dataclass(frozen=True)
class Proposal:
    layout: Layout
    cost_s: float
    reason: str = "simulated"
    reduce_s: float = 0.0


def model_s(layout: Layout, settings: Sequence[tuple[str, str]]) -> float:
    """Seconds per step as the simulated planner has it."""
    large = dict(settings).get("comm.bucket_mib") == "25.0"
    return ROW_S * BATCH * (1.0 if large else 1.3) * (1.6 if layout.pp > 1 else 1.0) / layout.world_size


def choose(
    workers: int,
    node_sizes: tuple[int, ...] = (),
    device_bytes: int = 0,
    limit_bytes: int = 0,
    settings: m.Settings = (),
    calibration: object = None,
) -> Proposal:
    """Two stages, as the job asks, where there are two workers; replicas alone once that is released."""
    free = dict(settings).get("layout.pp") == "auto"
    layout = Layout(dp=workers, micro_batch=4)
    if not free and workers > 1:
        layout = Layout(pp=2, dp=workers // 2, micro_batch=4)
    return Proposal(layout, model_s(layout, settings))


def default(running: Layout | None, workers: int, *question: Any) -> Proposal | None:
    """The running layout, with the replicas that fit."""
    settings = question[3] if len(question) > 3 else ()
    if running is None or workers * running.dp // running.world_size < 1:
        return None
    dp = min(running.dp, workers * running.dp // running.world_size)
    rows = running.replica_rows if dp == running.dp else ()
    layout = replace(running, dp=dp, replica_rows=rows)
    return Proposal(layout, model_s(layout, settings))


class AdaptingSim(Sim):
    """Run whose steps take what its workers' speeds, its layout and its settings make of them."""

    def __init__(self, seed: int, job: JobConfig, checks: Checks) -> None:
        super().__init__(seed, job, choose, checks)
        self.shell_class = AdaptingShell
        self.shells: list[AdaptingShell] = []
        self._speed: dict[str, float] = {}
        self.changes = Changes(self, KINDS)
        self.hurts = self.rng.chance(0.3)  # large buckets, which the cost model likes

    def row_s(self, spec: m.GenerationSpec, replica: int) -> float:
        """Seconds per row of the slowest rank of a replica."""
        ranks = range(replica, spec.layout.world_size, spec.layout.dp)
        return max(self.speed(spec.members[rank].worker) for rank in ranks)

    def speed(self, worker: str) -> float:
        if worker not in self._speed:
            self._speed[worker] = ROW_S * (self.rng.pick((1.7, 3.0)) if self.rng.chance(0.2) else 1.0)
        return self._speed[worker]

    def generation(self, spec: m.GenerationSpec) -> SimGeneration:
        new = spec.id not in self.generations
        found = super().generation(spec)
        if new:
            found.step_s = self.true_s(spec)
        return found

    def true_s(self, spec: m.GenerationSpec) -> float:
        large = dict(spec.settings).get("comm.bucket_mib") == "25.0"
        each = [self.row_s(spec, at) for at in range(spec.layout.dp)]
        slow = 1.6 if spec.layout.pp > 1 else 1.0
        share = (1.7 if self.hurts else 1.0) if large else 1.3
        return step_s_by_speed(spec.layout, each, BATCH) * slow * share / spec.layout.pp

    def measure(self) -> None:
        """Tell the coordinator what is measured, as long as the run goes on."""
        if self.over:
            return
        self.after(REPORT_S, self.measure)
        newest = None if self.shell is None else self.shell.newest
        generation = None if newest is None else self.generations.get(newest.id)
        if generation is None or generation.step < generation.spec.resume_step + 3:
            return
        self.tell(m.Measured(generation.spec.id, self._figures(generation)))

    def _figures(self, generation: SimGeneration) -> m.RunFigures:
        spec, noise = generation.spec, 1 + 0.1 * (self.rng.random() - 0.5)
        step_s = generation.step_s * noise
        sums = 0.05 if dict(spec.settings).get("comm.bucket_mib") == "25.0" else 0.35
        bubble = 0.4 if spec.layout.pp > 1 else 0.0
        phases = {"reduce": sums * step_s, "bubble": bubble * step_s, "forward": 0.2 * step_s}
        rows = [spec.layout.rows(at, BATCH) for at in range(spec.layout.dp)]
        return m.RunFigures(
            generation.step - spec.resume_step,
            generation.step,
            step_s,
            phases,
            tuple(self.row_s(spec, at) * noise for at in range(spec.layout.dp)),
            tuple(end - start for start, end in rows),
        )


class AdaptingShell(ReplayingShell):
    """Coordinator of a run that adapts."""

    sim: AdaptingSim

    def __init__(self, sim: AdaptingSim) -> None:
        super().__init__(sim, default)
        sim.shells.append(self)
        self._changes = sim.changes
        self.remembered = sim.changes.past

    def alert(self, command: m.Alert) -> None:
        if self.term == self.sim.storage.term:  # else nobody reads its record any more
            self._changes.told(command)

    def run_generation(self, command: m.RunGeneration) -> None:
        if self.term == self.sim.storage.term:
            self._changes.begun(command)
        super().run_generation(command)

    def judged(self, before: MachineState, commands: list[m.Command]) -> None:
        memory, say = self.machine.memory, self.sim.violation
        applied = [c for c in commands if isinstance(c, m.Alert) and c.kind == ADAPT]
        if any(alert.data["action"] == "apply" for alert in applied):
            moves = memory.transitions
            if before is not MachineState.RUNNING or moves[:1] != [
                (MachineState.RUNNING, MachineState.LEAVING)
            ]:
                say(f"a change was decided on in state {before}, with {moves}")
            if memory.incident is not None:
                say(f"a change was decided on during a failure: {memory.incident.cause}")
        for spec in (c.spec for c in commands if isinstance(c, m.RunGeneration)):
            rows = spec.layout.replica_rows
            if rows and (sum(rows) != BATCH or len(rows) != spec.layout.dp):
                say(f"generation {spec.id} feeds {rows}, the batch is {BATCH}")


def simulate_adapting(seed: int, kill_at: str = "") -> tuple[Report, int]:
    """Run one seed; returns its report and the number of changes that were made.

    Args:
        kill_at: stage of a change (`STAGES`) at which the coordinator dies, once; empty: at none.
    """
    draw = Rng(seed)
    nodes, workers = 2, 2 + draw.below(4)
    job = draw_job(workers)
    checks = Checks(Coverage())
    sim = AdaptingSim(draw.bits(), job, checks)
    checks.sim = sim
    sim.changes.kill_at = kill_at
    for _ in range(nodes):
        sim.add_node(-(-workers // nodes))
    coordinator(sim)
    sim.after(REPORT_S, sim.measure)
    strikes = [one for one in plan(sim, draw.below(4)) if one[1] != "stop"]
    for at, name in strikes:
        sim.after(at, _strike, sim, name)
    sim.quiet_at = max([at for at, _ in strikes], default=0.0) + LONGEST_S
    sim.run(LIMIT_S + 12 * STEPS * ROW_S * BATCH)
    checks.log()
    made = [spec for spec in checks.specs.values() if spec.reason.startswith("adapt: ")]
    if len(made) > MOST_CHANGES:
        sim.violation(f"{len(made)} changes in one run")
    for shell in sim.shells:
        if difference := shell.replays():
            sim.violation(difference)
    failures = tuple(sim.failures)
    return Report(seed, sim.events, tuple(sim.struck), len(checks.specs), sim.now, failures), len(made)


def _strike(sim: Sim, name: str) -> None:
    sim.struck.append(name)
    sim.struck_at = sim.now
    sim.quiet_at = max(sim.quiet_at, sim.now + LONGEST_S)
    FAULTS[name](sim)
