"""Simulation of a node whose agent dies alone, and of the fresh one that finds its slots.

The fresh agent tells at its first look what is pinned there, and joins up to seconds later. Storage hangs
meanwhile, so that a snapshot waits. What the node holds pinned must be committed or released soon after.
"""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import LONGEST_S, coordinator
from picotron_ray.coordinator.simulator.nodes import SimNode
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import EVENTS, FAMILIES, LIMIT_S, Report, draw_job
from picotron_ray.coordinator.simulator.slots import complete
from picotron_ray.coordinator.simulator.world import Sim

INTERVAL_STEPS = 30  # nothing that comes by itself releases what was forgotten
SETTLED_S = 6.0  # from a generation's first step, with storage up again, until all is committed or released
FIRST_TOLD_S, JOINED_S = (
    0.5,
    2.0,
)  # at most: from an agent's start to its first look, and from that to its join
LONGEST_AWAY_S = 12.0  # until training has gone on, with the least number of nodes for it


def simulate_comeback(seed: int) -> Report:
    """Run one seed; the same seed gives the same report, event for event."""
    draw, nodes = Rng(seed), 2 + seed % 2
    job = draw_job(2 * nodes, INTERVAL_STEPS)
    checks = Checks(Coverage())
    sim = Sim(draw.bits(), job, FAMILIES[draw.below(len(FAMILIES))], checks)
    checks.sim = sim
    sim.step_s = EVENTS / (nodes + 1) / job.steps
    for _ in range(nodes):
        sim.add_node(2)
    coordinator(sim)
    sim.quiet_at = LONGEST_S + sim.step_s * job.steps
    sim.after(10.0 + draw.uniform(0.0, 12.0), _replace_agent, sim, draw)
    sim.run(LIMIT_S)
    checks.log()
    return Report(seed, sim.events, tuple(sim.struck), len(checks.specs), sim.now, tuple(sim.failures))


def _replace_agent(sim: Sim, draw: Rng) -> None:
    """Have a snapshot taken that storage does not take, and an agent die soon after that."""
    sim.struck.append("replaced")
    sim.struck_at = sim.now
    lost_s = draw.uniform(sim.step_s, 2 * sim.step_s + 1.0)
    sim.storage.hung_until = sim.now + lost_s + FIRST_TOLD_S + JOINED_S + draw.uniform(0.0, 2.0)
    sim.tell(m.UserRequest("checkpoint"))
    sim.after(lost_s, _lose, sim, draw, draw.pick(list(sim.nodes.values())))


def _lose(sim: Sim, draw: Rng, node: SimNode) -> None:
    first_s = draw.uniform(0.05, FIRST_TOLD_S)
    node.cut_until = sim.now + first_s - 0.01
    sim.tell(m.NodeLost(node.name, "its agent died"))
    sim.after(first_s, node.tell_seals)
    sim.after(first_s + draw.uniform(0.05, JOINED_S), _join, sim, node)


def _join(sim: Sim, node: SimNode) -> None:
    """Join, and tell nothing more of what is pinned: that was told."""
    told = {(held.info.generation, held.info.step) for held in node.slots.values() if held.pinned}
    node.introduce()
    sim.after(max(LONGEST_AWAY_S, sim.storage.hung_until - sim.now), _settled, sim, node, told)


def _settled(sim: Sim, node: SimNode, told: set[tuple[m.GenerationId, int]]) -> None:
    """Check what was told before the join, once a generation trains again."""
    newest = None if sim.shell is None else sim.shell.newest
    generation = None if newest is None else sim.generations.get(newest.id)
    if generation is None or generation.step < generation.spec.resume_step + 2:
        sim.after(1.0, _settled, sim, node, told)
        return
    sim.after(SETTLED_S, _all_released, sim, node, told)


def _all_released(sim: Sim, node: SimNode, told: set[tuple[m.GenerationId, int]]) -> None:
    newest = None if sim.shell is None else sim.shell.newest
    for state in sorted(told):
        held = [h.info for n in sim.nodes.values() for h in n.slots.values() if h.pinned]
        parts = [info for info in held if (info.generation, info.step) == state]
        whole = complete(parts, sim.checks.specs[state[0]].layout)
        void = not sim.checks.counts(newest, *state)
        if any(info.node == node.name for info in parts) and (whole or void):
            why = "is void" if void else "is whole"
            sim.violation(
                f"step {state[1]} was told by {node.name} before it joined, {why}, and is still pinned"
            )
