"""Faults of agents, links, disks and whole racks: what freezes, hangs, hears one side, or goes together."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.nodes import SimNode
from picotron_ray.coordinator.simulator.shell import start_shell
from picotron_ray.coordinator.simulator.world import Sim

STUNS_S = 15.0  # so long an agent that is to be stopped waits for being asked
TOLD_S = 10.0  # by then the stalls that a partition led to have been told


def _some_node(sim: Sim) -> SimNode | None:
    return sim.rng.pick(list(sim.nodes.values())) if sim.nodes else None


def freeze(sim: Sim) -> None:
    """An agent is stopped for a while: what it is told and what it tells comes late, and all at once."""
    if (node := _some_node(sim)) is not None:
        node.frozen_until = sim.now + sim.rng.uniform(0.5, 9.0)


def stun(sim: Sim) -> None:
    """A worker dies, and the next agents are stopped for a while just when they are asked for a store."""
    sim.stuns = [sim.rng.uniform(2.0, 12.0) for _ in range(1 + sim.rng.below(2))]
    sim.stuns_until = sim.now + STUNS_S
    if workers := [w for node in sim.nodes.values() for w in node.workers.values() if w.ready]:
        worker = sim.rng.pick(workers)
        worker.node.worker_dies(worker, "killed")


def reborn(sim: Sim) -> None:
    """An agent dies alone and is started again: what it was asked is lost, and it tells all anew."""
    if (node := _some_node(sim)) is None:
        return
    seconds = sim.rng.uniform(0.5, 4.0)
    node.cut_until = max(node.cut_until, sim.now + seconds)
    if seconds > 2.0:
        sim.after(2.0, sim.tell, m.AgentRestarting(node.name))
    sim.after(seconds + 0.01, node.restart)


def lose(sim: Sim) -> None:
    """The next few messages of one node are lost, and nothing else is wrong with it."""
    if (node := _some_node(sim)) is not None:
        node.loses, node.loses_until = 1 + sim.rng.below(4), sim.now + 5.0


def deaf(sim: Sim) -> None:
    """A node hears no coordinator for a while, but is heard."""
    if (node := _some_node(sim)) is not None:
        node.deaf_until = sim.now + sim.rng.uniform(1.0, 12.0)


def dumb(sim: Sim) -> None:
    """A node is not heard by any coordinator for a while, but hears."""
    if (node := _some_node(sim)) is not None:
        node.dumb_until = sim.now + sim.rng.uniform(1.0, 12.0)


def part(sim: Sim) -> None:
    """Two nodes do not reach each other for a while; both reach the coordinator."""
    if len(sim.nodes) > 1 and sim.now > sim.parted_until + TOLD_S * bool(sim.parted):
        first = sim.rng.below(len(sim.nodes))
        names = list(sim.nodes)
        sim.parted = {names[first], names[(first + 1) % len(names)]}
        sim.parted_until = sim.now + sim.rng.uniform(1.0, 8.0)
        for generation in list(sim.generations.values()):
            if generation.parted():
                sim.after(1.5, generation.stalled)


def stuck(sim: Sim) -> None:
    """Calls of storage hang for a while, and are answered then."""
    sim.storage.hung_until = sim.now + sim.rng.uniform(2.0, 20.0)


def sided(sim: Sim) -> None:
    """Storage answers to all but one node."""
    if (node := _some_node(sim)) is not None:
        node.storage_down_until = sim.now + sim.rng.uniform(2.0, 15.0)


def island(sim: Sim) -> None:
    """A switch fails amid a checkpoint: a node and storage are out of reach, and the node is back first."""
    sim.tell(m.UserRequest("checkpoint"))
    sim.after(sim.rng.uniform(0.2, 2.0), _cut_off, sim)


def _cut_off(sim: Sim) -> None:
    if (node := _some_node(sim)) is not None:
        node.cut_until = max(node.cut_until, sim.now + sim.rng.uniform(2.5, 8.0))
        sim.storage.down_until = max(sim.storage.down_until, node.cut_until + sim.rng.uniform(0.0, 8.0))


def full(sim: Sim) -> None:
    """The memory for snapshots of a node is full for a while: nothing is sealed there."""
    if (node := _some_node(sim)) is not None:
        node.full_until = sim.now + sim.rng.uniform(2.0, 15.0)


def emptied(sim: Sim) -> None:
    """Somebody deletes the folder of a node: its workers are stopped until what they hold open is saved."""
    homes = [node for node in sim.nodes.values() if any(w.generation for w in node.workers.values())]
    homes = [node for node in homes if sim.now >= node.rescued_until]
    if homes:
        sim.rng.pick(homes).rescue(sim.rng.uniform(1.0, 15.0))


def hushed(sim: Sim) -> None:
    """A node tells of stalls and ended processes late."""
    if (node := _some_node(sim)) is not None:
        node.hushed_until = sim.now + sim.rng.uniform(1.0, 6.0)


def rack(sim: Sim) -> None:
    """Half of the nodes go at once; others come in their place."""
    for gone in list(sim.nodes.values())[: max(1, len(sim.nodes) // 2)]:
        sim.remove_node(gone, told=sim.rng.chance(0.5))
        sim.after(sim.rng.uniform(2.0, 15.0), sim.add_node, gone.capacity)


def head(sim: Sim) -> None:
    """The head goes with the coordinator, and is away for longer than a process."""
    if sim.shell is not None:
        sim.shell.die()
        sim.shell = None
        sim.after(sim.rng.uniform(4.0, 20.0), _back, sim)


def _back(sim: Sim) -> None:
    if sim.shell is None and not sim.over:
        start_shell(sim)


BREAKDOWNS = (
    *(freeze, stun, reborn, lose, deaf, dumb, part, stuck, sided, island, full, hushed, emptied, rack, head),
)
