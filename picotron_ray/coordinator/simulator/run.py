"""Simulation of one seed: draw a cluster, a job and its faults, run it to the end, report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.plan_book import Choose
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, ambush, coordinator, plan
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout

LIMIT_S = 60.0
"""Virtual seconds after the last fault within which a run must end, beside those of its steps.

A generation is given up (8 s), nodes are asked (11 s) and workers start (40 s); or an answer of storage that
was lost is asked for again (50 s).
"""
LARGE = 250  # one seed in so many has ...
LARGE_NODES = 200  # ... so many nodes
LARGE_STEP_S = 0.5
EVENTS = 210.0  # a tick and each node's heartbeat per second: this many where nothing goes wrong
FAULT_WINDOW_S = 4.0  # a fault counts as at work for this long (coverage)


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one seed; ``failures`` is empty where all invariants held."""

    seed: int
    events: int
    faults: tuple[str, ...]
    generations: int
    virtual_s: float
    failures: tuple[str, ...]


@dataclass(frozen=True)
class SimChoice:
    layout: Layout
    cost_s: float
    reason: str = "simulated"


def _family(kind: int) -> Choose:
    """A way to lay out n workers: replicated, sharded, tensor x data, pipeline x data, or exactly two."""

    def choose(
        workers: int, node_sizes: tuple[int, ...] = (), device_bytes: int = 0, limit_bytes: int = 0
    ) -> SimChoice:
        if kind == 0 or (workers == 1 and kind in (2, 3)):
            return SimChoice(Layout(dp=workers), 1.0 / workers)
        if kind == 1:
            return SimChoice(Layout(dp=workers, zero=2), 1.0 / workers)
        pairs = workers // 2
        if pairs == 0:
            raise LayoutError("needs two workers")
        if kind == 2:
            return SimChoice(Layout(tp=2, dp=pairs), 1.0 / (2 * pairs))
        if kind == 3:
            return SimChoice(Layout(pp=2, dp=pairs), 1.0 / (2 * pairs))
        return SimChoice(Layout(tp=2), 0.5)

    return choose


FAMILIES = tuple(_family(kind) for kind in range(5))
JOBS: dict[tuple[object, ...], JobConfig] = {}


def draw_job(
    workers: int,
    interval: int,
    final_wait_s: float = 3600.0,
    rewind: bool = False,
    in_a_row: int = 20,
    resume_step: int | None = None,
) -> JobConfig:
    """Return the job of so many workers; each is made once."""
    key = workers, interval, final_wait_s, rewind, in_a_row, resume_step
    if key not in JOBS:
        tree: dict[str, Any] = {
            "steps": 60,
            "cluster": {"max_workers": workers, "start_timeout_s": 60},
            "elastic": {
                "max_failures": 1000,
                "max_failures_without_progress": in_a_row,
                "first_step_timeout_s": 15,
            },
            "checkpoint": {
                "interval_steps": interval,
                "resume_step": resume_step,
                "keep_last": 2,
                "gc_grace_s": 15,
            },
            "storage": {"retry_deadline_s": 5, "final_wait_s": final_wait_s},
        }
        if rewind:
            tree["elastic"] |= {"on_nonfinite": "rewind", "rewind_steps": 12}
        JOBS[key] = JobConfig.model_validate(tree)
    return JOBS[key]


def simulate(
    seed: int,
    coverage: Coverage | None = None,
    bad_step: int = 0,
    rewind: bool = False,
    world: type[Sim] = Sim,
) -> Report:
    """Run one seed; the same seed gives the same report, event for event.

    Args:
        bad_step: step that every generation finds bad; 0: none.
        rewind: the run goes back before it and passes over it; else it ends there.
        world: kind of simulation.
    """
    draw = Rng(seed)
    nodes, capacity = 1 + draw.below(3), 1 + draw.below(3)
    workers = max(2, min(nodes * capacity, 2 + draw.below(4)))
    large = seed % LARGE == LARGE - 1
    if large:
        nodes, capacity, workers = LARGE_NODES, 1, LARGE_NODES
    choose = FAMILIES[draw.below(len(FAMILIES))]
    coverage = Coverage() if coverage is None else coverage
    checks = Checks(coverage)
    job = draw_job(workers, 5 + draw.below(10), rewind=rewind)
    sim = world(draw.bits(), job, choose, checks)
    checks.sim, sim.bad_step = sim, bad_step
    sim.step_s = LARGE_STEP_S if large else EVENTS / (nodes + 1) / sim.job.steps
    if draw.chance(0.2):
        sim.start_failures = 0.3
    for _ in range(nodes):
        sim.add_node(max(capacity, -(-workers // nodes)))
    coordinator(sim)
    drawn = plan(sim, 3 + draw.below(5))
    for at, name in drawn:
        sim.after(at, _strike, sim, coverage, name)
    sim.quiet_at = drawn[-1][0] + LONGEST_S
    waiting = ambush(sim)

    def entered(state: MachineState) -> None:
        for trap in [trap for trap in waiting if trap[0] is state]:
            waiting.remove(trap)
            sim.after(trap[1], _strike, sim, coverage, trap[2])

    checks.entered = entered
    try:
        sim.run(LIMIT_S + job.steps * sim.step_s)
        checks.log()
        if not sim.failures:
            sim.settle()
    finally:
        sim.close()
    return Report(seed, sim.events, tuple(sim.struck), len(checks.specs), sim.now, tuple(sim.failures))


def _strike(sim: Sim, coverage: Coverage, name: str) -> None:
    sim.struck.append(name)
    sim.struck_at = sim.now
    sim.quiet_at = max(sim.quiet_at, sim.now + LONGEST_S)
    active = coverage.active
    active.add(name)
    sim.after(FAULT_WINDOW_S, active.discard, name)
    FAULTS[name](sim)


def simulate_many(seeds: Iterable[int]) -> tuple[list[Report], Coverage]:
    """Run many seeds, and add up their coverage."""
    coverage = Coverage()
    reports = []
    for seed in seeds:
        coverage.active.clear()
        reports.append(simulate(seed, coverage))
    return reports, coverage
