"""Replicas that differ: the run goes on from what they agreed on, and leaves the node that held wrong values.

Members find and judge it, all alike (``debug.replica_check_steps``). Where they cannot tell who is wrong, the
same members compute the steps since then again, and compare (``GenerationSpec.replay``). A node is moved off
as an operator's drain is: for as long as the launch lasts, over restarts of the coordinator, and only where
others have room. That is bounded as the answers to rules are (``alerts.act_budget``).
"""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.agreed_state import REPLICAS
from picotron_ray.coordinator.generation_stop import blame
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.operator_orders import ORDER, send_away
from picotron_ray.coordinator.policies import rule_acts
from picotron_ray.coordinator.policies.rule_acts import HOUR_S, ActView
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind


def note_divergence(memory: MachineMemory, event: m.Outcome) -> None:
    """Note what all members find alike, once; the node of whoever is named is moved off."""
    found, spec = event.divergence, memory.spec
    if found is None or spec is None or memory.divergence is not None:
        return
    memory.divergence = found
    liars = [spec.members[rank] for rank in found.liars if rank < len(spec.members)]
    data = {"step": found.step, "agreed_step": found.agreed_step, "ranks": list(found.liars)}
    nodes = sorted({member.node for member in liars})
    memory.alert("error", REPLICAS, event.detail, **data, nodes=nodes, decided=bool(liars))
    for node in nodes:
        _move_off(memory, node, found.step)
    if not found.settled:
        target = liars[0].worker if liars else f"step {found.step}"
        blame(memory, FailureKind.DIVERGED, target, culprit=True, text=event.detail)
    elif memory.state is MachineState.RUNNING:
        memory.reason = event.detail
        memory.go(MachineState.LEAVING)


def _move_off(memory: MachineMemory, name: str, step: int) -> None:
    memory.rules_obeyed = tuple(at for at in memory.rules_obeyed if memory.now - at < HOUR_S)
    nodes = memory.roster.nodes
    node = nodes.get(name)
    others = [each for each in nodes.values() if each is not node and not each.draining and not each.barred]
    view = ActView(
        act="quarantine",
        obeyed=len(memory.rules_obeyed),
        step=step,
        node_known=node is not None and not node.draining,
        room_elsewhere=sum(each.capacity for each in others),
    )
    obey, why = rule_acts.decide(memory.job, view)
    if not obey:
        text = f"node {name} held wrong values, and is not moved off: {why}"
        memory.alert("error", REPLICAS, text, node=name, done=False)
        return
    memory.rules_obeyed = (*memory.rules_obeyed, memory.now)
    send_away(memory, m.NodeDrain(name))
    text = f"drain: the run moves off node {name}, which held wrong values: have its devices tested"
    # as an operator's order is told, so that a later term knows it
    memory.alert("warning", ORDER, text, order="drain", accepted=True, node=name, left_s=0.0)
