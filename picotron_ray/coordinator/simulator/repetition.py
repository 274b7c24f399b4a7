"""Simulation of failures that repeat, and of a run that is told to go back to an older commit.

One kind a seed: a step that fails now and then with progress in between, a worker that always fails, a host
memory that always fails while commits do not, a job that always fails, and ``checkpoint.resume_step``. The
breaker must climb as far as it takes, start anew after progress, and give up where nothing helps.
"""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, coordinator
from picotron_ray.coordinator.simulator.protocols import GenerationProtocol, WorkerProtocol
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import EVENTS, FAMILIES, Report, draw_job
from picotron_ray.coordinator.simulator.slots import SimSlot
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.layout.layout import Layout

IN_A_ROW = 7  # elastic.max_failures_without_progress: two more than the ladder has rungs
LIMIT_S = 200.0
KINDS = ("flaky", "worker", "memory", "doomed", "resume")
RESUME_STEP = 20
OLD = m.GenerationId(1, 1)


def simulate_repetition(seed: int) -> Report:
    """Run one seed; the same seed gives the same report, event for event."""
    draw, kind = Rng(seed), KINDS[seed % len(KINDS)]
    nodes = 1 + draw.below(3)
    resume_step = RESUME_STEP if kind == "resume" else None
    job = draw_job(4, 5 + draw.below(5), in_a_row=IN_A_ROW, resume_step=resume_step)
    checks = Checks(Coverage())
    sim = Sim(draw.bits(), job, FAMILIES[draw.below(4)], checks)
    checks.sim, checks.doomed = sim, kind == "doomed"
    sim.step_s = EVENTS / (nodes + 1) / job.steps
    for _ in range(nodes):
        sim.add_node(-(-4 // nodes))
    _curse(sim, kind, draw)
    if kind == "resume":
        old_commits(sim, checks)
    coordinator(sim)
    if kind in ("memory", "resume"):
        for name in ("kill", draw.pick(("kill", "restart", "head"))):
            sim.after(6.0 + draw.uniform(14.0, 40.0) * sim.step_s, _strike, sim, name)
    sim.quiet_at = sim.step_s * job.steps + LONGEST_S
    sim.run(LIMIT_S)
    launched = len(checks.specs) - (kind == "resume")
    if kind == "doomed" and not sim.failures and launched > IN_A_ROW:
        sim.violation(f"given up after {launched} generations, {IN_A_ROW} failures in a row are allowed")
    checks.log()
    return Report(seed, sim.events, (kind, *sim.struck), launched, sim.now, tuple(sim.failures))


def _strike(sim: Sim, name: str) -> None:
    if not sim.over:
        sim.struck.append(name)
        sim.struck_at = sim.now
        FAULTS[name](sim)


def _curse(sim: Sim, kind: str, draw: Rng) -> None:
    every = 2 + draw.below(3)

    def flaky(generation: GenerationProtocol) -> WorkerProtocol | None:
        done = generation.step - generation.spec.resume_step
        return _member(generation, 0) if done == every else None

    def worker(generation: GenerationProtocol) -> WorkerProtocol | None:
        return next((each for each in generation.members() if each.name == "w1-1"), None)

    def memory(generation: GenerationProtocol) -> WorkerProtocol | None:
        source, first = generation.spec.source, generation.step == generation.spec.resume_step
        bad = source.kind == "slots" and source.generation == m.GenerationId(1, 1)
        return _member(generation, -1) if first and bad else None

    def doomed(generation: GenerationProtocol) -> WorkerProtocol | None:
        return _member(generation, draw.below(len(generation.spec.members)))

    curses = {"flaky": flaky, "worker": worker, "memory": memory, "doomed": doomed}
    sim.cursed = curses.get(kind, sim.cursed)


def _member(generation: GenerationProtocol, index: int) -> WorkerProtocol | None:
    members = generation.members()
    return members[index % len(members)] if members else None


def old_commits(sim: Sim, checks: Checks) -> None:
    """Fill the log with what an earlier launch committed."""
    storage = sim.storage
    spec = m.GenerationSpec(
        OLD, (m.Member("old", "old"),), Layout(dp=1), m.Source("init"), "an earlier launch"
    )
    checks.specs[OLD] = spec
    storage.append_generation(storage.claim(), spec)
    info = m.SlotInfo("old", "old.0", OLD, 0, 0, (m.Fragment(0),))
    for step in (10, RESUME_STEP, 30):
        held = SimSlot(replace(info, step=step), ((OLD, 0, step),))
        storage.parts[OLD, step] = {"old": [held]}
        storage.append_commit(1, m.AppendCommit(OLD, step, ("old",)))
    storage.times += [sim.now] * len(storage.log)
