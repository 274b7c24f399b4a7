"""Simulation of a run whose storage goes down for good before its end, and of the launch after that.

The run ends with "storage", or everything of it is killed while it waits. Of its slots only those survive
that the machine said to keep. The next launch has other nodes, which took them over; storage is up again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, coordinator
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import EVENTS, FAMILIES, Report, draw_job
from picotron_ray.coordinator.simulator.slots import SimSlot, complete
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState

AnySim = TypeVar("AnySim", bound=Sim)
FINAL_WAIT_S = 100.0  # twice what passes until a lost answer is asked for again
LIMIT_S = 400.0  # of virtual time after the last fault: both launches wait for storage
FOR_EVER_S = 1e9
BEFORE = ("kill", "hang", "error", "pause", "noise", "request")
AFTER = ("restart", "pause", "noise", "cut", "lag", "mute", "outage", "kill")


def simulate_blackout(seed: int) -> Report:
    """Run one seed through both launches; the same seed gives the same report, event for event."""
    sim, checks, draw = first_launch(seed, Sim)
    if cut_short(sim):
        _relaunch(sim, checks, draw)
    checks.log()
    return Report(seed, sim.events, tuple(sim.struck), len(checks.specs), sim.now, tuple(sim.failures))


def first_launch(seed: int, world: Callable[..., AnySim]) -> tuple[AnySim, Checks, Rng]:
    """Run the launch whose storage goes down; returns its simulation, its watcher and its draws.

    Args:
        world: kind of simulation.
    """
    draw = Rng(seed)
    nodes, capacity = 1 + draw.below(3), 1 + draw.below(3)
    workers = max(2, min(nodes * capacity, 2 + draw.below(4)))
    job = draw_job(workers, 5 + draw.below(10), FINAL_WAIT_S)
    checks = Checks(Coverage())
    sim = world(draw.bits(), job, FAMILIES[draw.below(len(FAMILIES))], checks)
    checks.sim, checks.blackout = sim, True
    sim.step_s = EVENTS / (nodes + 1) / job.steps
    for _ in range(nodes):
        sim.add_node(max(capacity, -(-workers // nodes)))
    coordinator(sim)
    duration_s = sim.step_s * job.steps
    sim.after(draw.uniform(5.0, duration_s), _down, sim)
    for name in [draw.pick(BEFORE) for _ in range(draw.below(4))]:
        sim.after(draw.uniform(5.0, duration_s), strike, sim, name)
    if draw.chance(0.3):
        sim.after(draw.uniform(10.0, duration_s), FAULTS["stop"], sim)
    crash_after_s = draw.uniform(8.0, 60.0) if draw.chance(0.4) else None
    checks.entered = lambda state: _crash_later(sim, state, crash_after_s)
    sim.quiet_at = duration_s + LONGEST_S + FINAL_WAIT_S
    sim.run(LIMIT_S)
    return sim, checks, draw


def cut_short(sim: Sim) -> bool:
    """Whether storage kept the run from committing its end."""
    return not sim.failures and sim.storage.down_until == FOR_EVER_S and not _ended_well(sim)


def _ended_well(sim: Sim) -> bool:
    """Whether the run had committed everything before storage went down."""
    return sim.shell is not None and sim.shell.finished is not None and sim.shell.finished.status != "storage"


def _down(sim: Sim) -> None:
    sim.storage.down_until = FOR_EVER_S


def strike(sim: Sim, name: str) -> None:
    """Have a fault strike, unless the run is over."""
    if not sim.over:
        sim.struck.append(name)
        FAULTS[name](sim)


def _crash_later(sim: Sim, state: MachineState, after_s: float | None) -> None:
    if state is MachineState.FINALISING and after_s is not None:
        sim.after(after_s, _crash, sim)


def _crash(sim: Sim) -> None:
    """Everything is killed at once, while the run waits for storage."""
    shell = sim.shell
    waits = shell is not None and shell.machine.memory.state is MachineState.FINALISING
    if (
        waits
        and sim.now < sim.storage.down_until
        and shell is not None
        and shell.machine.memory.storage_fails
    ):
        sim.struck.append("crash")
        sim.over = True


def _relaunch(sim: Sim, checks: Checks, draw: Rng) -> None:
    """Start again with what was kept, on other nodes, with storage up."""
    shell = sim.shell
    assert shell is not None
    end, final = shell.finished, shell.machine.memory.final
    assert final is not None
    keep = None if end is None else end.keep
    if end is not None and keep is None:
        sim.violation(f"the run ended as {end.status} and kept nothing")
        return
    kept = [
        (node, [held for name, held in node.slots.items() if _survives(held, name, node.kept, keep)])
        for node in sim.nodes.values()
    ]
    infos = [held.info for _, slots in kept for held in slots if held.info.step == final[1]]
    if not any(
        complete([info for info in infos if info.generation == generation], checks.specs[generation].layout)
        for generation in {info.generation for info in infos}
    ):
        sim.violation(f"step {final[1]} was not committed, and is not kept")
        return
    shell.die()
    sim.restart_clock()
    sim.nodes.clear()
    for node, slots in kept:
        _move(sim, node.capacity, node.kept_by or node.spec, slots)
    coordinator(sim)
    for name in [draw.pick(AFTER) for _ in range(draw.below(4))]:
        sim.after(draw.uniform(0.0, 8.0), strike, sim, name)
    sim.quiet_at = sim.now + LONGEST_S + sim.step_s * sim.job.steps
    checks.blackout = False
    sim.run(LIMIT_S)
    committed = {commit.step for commit in sim.storage.commits()}
    resumed = [spec.resume_step for spec in checks.specs.values() if spec.id.term > shell.machine.memory.term]
    if not sim.failures and final[1] not in committed and min(resumed, default=0) < final[1]:
        sim.violation(f"step {final[1]} was kept, and neither committed nor gone on from")


def _survives(held: SimSlot, name: str, marked: set[str], keep: m.Source | None) -> bool:
    """Whether a slot is there after the end (``keep``) or after the death of everything."""
    if keep is None:
        return name in marked
    return keep.generation is None or (held.info.generation, held.info.step) == (keep.generation, keep.step)


def _move(sim: Sim, capacity: int, spec: m.GenerationSpec | None, slots: list[SimSlot]) -> None:
    """Add a node that took over these slots."""
    node = sim.add_node(capacity, told=False)
    node.kept_by = spec
    for held in slots:
        node.keep(SimSlot(replace(held.info, node=node.name), held.history))
        node.kept.add(held.info.slot)
    node.hello()
