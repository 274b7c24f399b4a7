"""Cost of the machine's answers at size: in proportion to the workers, not to their square."""

from __future__ import annotations

import time

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import job

EACH = 8


class Cluster:
    """A machine before nodes that do what it commands at once; time passes as ``now`` is set."""

    def __init__(self, nodes: int) -> None:
        self.machine = Machine(job(cluster__max_workers=nodes * EACH, cluster__min_workers=1))
        self.now, self.nodes = 0.0, [f"{index:06d}" for index in range(nodes)]
        self.tell(m.Begin(1))
        for node in self.nodes:
            self.tell(m.NodeJoined(node, EACH))
        while self.machine.memory.state is not MachineState.RUNNING:
            self.now += 0.25
            self.tell(m.Tick())

    def tell(self, *events: m.Event) -> None:
        waiting = list(events)
        for event in waiting:  # grows
            for command in self.machine.handle(event, self.now):
                if isinstance(command, m.StartWorker):
                    waiting.append(m.WorkerReady(command.worker, command.node, ""))
                elif isinstance(command, m.PlanLayouts):
                    waiting += [m.Planned(q, Layout(dp=q.workers), 1.0, "dp") for q in command.questions]
                elif isinstance(command, m.CollectInventory):
                    waiting.append(m.Inventory(command.node, command.request, ()))

    def lose_a_node(self) -> float:
        """Lose a node and recover; returns CPU seconds of all that comes of it."""
        spec = self.machine.memory.spec
        assert spec is not None
        began_s = time.thread_time()
        self.tell(m.NodeLost(self.nodes[-1], "gone"))
        assert self.machine.memory.state is MachineState.ABORTING
        for member in spec.members:
            self.tell(m.Outcome(member.worker, spec.id, FailureKind.PEER_LOST, 3))
        self.tell(*(m.Heartbeat(node, None, {}) for node in self.nodes))
        assert self.machine.memory.state is MachineState.RUNNING
        new = self.machine.memory.spec
        assert new is not None
        assert len(new.members) == len(spec.members) - EACH
        self.now += 30.0
        for node in self.nodes[:-1]:  # a node is missing for good: its workers are wanted elsewhere
            names = [member.worker for member in new.members if member.node == node]
            self.tell(m.Heartbeat(node, new.id, dict.fromkeys(names, 4)))
            self.tell(m.SnapshotSealed(node, new.id, 4, ()))
            self.tell(m.AgentRestarting(node))
            self.tell(m.UserRequest("checkpoint"))
        return time.thread_time() - began_s


def test_a_recovery_costs_in_proportion_to_the_workers() -> None:
    """Eight times the nodes cost eight times as much, or 64 times where each answer looks at all of them."""
    small, large = (min(Cluster(nodes).lose_a_node() for _ in range(2)) for nodes in (48, 384))
    assert large < 24 * small
