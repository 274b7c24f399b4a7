"""Draining nodes: the run moves off them in time, then gives them back.

A node is free once nobody trains on it, and nothing that only it holds is needed: the state that the present
generation took over is committed, or a younger one is sealed on the nodes that stay. Then ``FreeNode`` ends
its workers and its agent, so that it can go before its deadline.
"""

from __future__ import annotations

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import DrainNotice, FreeNode, TakeSnapshot
from picotron_ray.coordinator.policies import drain
from picotron_ray.coordinator.policies.membership import RosterNode
from picotron_ray.coordinator.rescues import forget_rescues
from picotron_ray.coordinator.states import MachineState

ASK_AGAIN_S = 5.0  # a snapshot that would free a node is asked for this often


def notice(memory: MachineMemory, event: DrainNotice) -> None:
    """Take no new work to a node that is to go, and have what it holds saved."""
    node = memory.roster.nodes.get(event.node)
    if node is None or node.draining:
        return
    now = memory.now + memory.slept_s
    memory.roster.drain(node.name)
    node.drain_noticed = now
    node.drain_deadline = event.deadline or None
    left = f"in {event.deadline - now:.0f} s" if event.deadline else "at a time that is not known"
    text = f"node {event.node} is to go {left}"
    memory.alert("warning", "drain", text, node=event.node, deadline=event.deadline)
    if memory.state is MachineState.RUNNING:
        save(memory)


def save(memory: MachineMemory) -> None:
    """Ask the members for a pinned checkpoint snapshot."""
    assert memory.spec is not None
    memory.emit(TakeSnapshot(memory.spec.id, tuple(member.worker for member in memory.spec.members)))


def reason_to_leave(memory: MachineMemory, to_start: int) -> str | None:
    """Reason to stop the running generation for nodes that are to go; None: there is none yet.

    Args:
        to_start: workers that nodes have room for and that are started next.
    """
    assert memory.spec is not None
    homes = {member.node for member in memory.living_members()}
    leaving = [node for node in _draining(memory) if node.name in homes]
    if not leaving:
        return None
    now = memory.now + memory.slept_s
    first = min(leaving, key=lambda node: _end(node))
    staying = [w for w in memory.living_members() if w.node not in {node.name for node in leaving}]
    staying += memory.roster.usable()
    most = min(len(staying), memory.job.cluster.max_workers)
    fits = most >= memory.job.cluster.min_workers and memory.choice(staying, most) is not None
    going = {node.name for node in _draining(memory)}
    view = drain.DrainView(
        waited_s=now - first.drain_noticed,
        remaining_s=None if first.drain_deadline is None else first.drain_deadline - now,
        others_fit=fits,
        starting=to_start + sum(w.node not in going for w in memory.roster.in_state("starting")),
        step_s=memory.step_s,
        commit_s=memory.commit_s,
    )
    leave, why = drain.decide(view)
    return f"node {first.name} is draining: {why}" if leave else None


def _draining(memory: MachineMemory) -> list[RosterNode]:
    return [memory.roster.nodes[name] for name in sorted(memory.roster.leaving)]


def _end(node: RosterNode) -> float:
    return node.drain_noticed + drain.UNKNOWN_NOTICE_S if node.drain_deadline is None else node.drain_deadline


def give_back(memory: MachineMemory) -> None:
    """Free the draining nodes that nothing needs any more."""
    nodes = _draining(memory)
    if not nodes or not _settled(memory):
        return
    for node in nodes:
        at_work = any(worker.state == "busy" for worker in memory.roster.workers.on(node.name))
        if not at_work and not memory.checkpoints.needs(node.name):
            memory.roster.lose(node.name, silent=False)
            forget_rescues(memory, node.name)
            memory.freed.add(node.name)
            memory.checkpoints.node_lost(node.name)
            memory.emit(FreeNode(node.name))
            memory.alert("info", "drained", f"node {node.name} is given back", node=node.name)


def _settled(memory: MachineMemory) -> bool:
    """Whether the run's newest state does not depend on what draining nodes hold."""
    if memory.kept is not None:
        return False
    if memory.state is MachineState.STARTING:
        return memory.spec is None
    if memory.state in (MachineState.WAITING, MachineState.PAUSED):
        return memory.checkpoints.committed >= memory.held_step
    if memory.state is not MachineState.RUNNING or not memory.progressed:
        return False
    assert memory.spec is not None
    going = {node.name for node in _draining(memory)}
    if any(member.node in going for member in memory.spec.members):
        return False
    committed = memory.checkpoints.committed >= memory.spec.resume_step
    if committed or memory.checkpoints.sealed_by(memory.spec.id):
        return True
    if memory.now >= memory.save_again_at:
        memory.save_again_at = memory.now + ASK_AGAIN_S
        save(memory)
    return False
