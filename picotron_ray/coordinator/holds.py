"""Stops that a person makes: all ranks held at a step boundary, or a debugger attached to some.

Both are told once, with their end. Neither is a part of a step's time: what is measured of the generation
leaves a hold out, and is measured anew after a debugger, which may have stopped its rank anywhere.
"""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import GenerationSpec, Heartbeat
from picotron_ray.coordinator.policies.pace import HELD, Hold, StepPace
from picotron_ray.coordinator.policies.store_home import SILENT_BEATS
from picotron_ray.coordinator.states import MachineState

ATTACHED = "debugger"
"""Kind of the alerts that tell of debuggers."""
TOLD_AFTER_S = 3.0
"""Length from which a hold is told: a recording that is saved holds all ranks for a moment."""


def note_stops(memory: MachineMemory, event: Heartbeat) -> None:
    """Note whom a node's heartbeat shows to be held, or to be debugged, in the running generation."""
    running = memory.state is MachineState.RUNNING
    if not running or memory.spec is None or event.generation != memory.spec.id:
        return
    _note_hold(memory, event)
    _note_debuggers(memory, event, memory.spec)


def _note_hold(memory: MachineMemory, event: Heartbeat) -> None:
    hold, step = memory.hold, max(event.steps.values(), default=-1)
    if hold is None:
        if event.held and step == memory.seen_step:
            memory.hold = Hold(event.node, step, memory.now)
            if _may_be_told(memory, step):
                _tell_hold(memory, memory.hold)
    elif memory.seen_step > hold.step or (event.node == hold.node and not event.held):
        memory.end_hold(memory.now)
    elif not event.held:
        if (heard := _silent_since(memory, hold)) is not None:
            memory.end_hold(heard)  # whoever showed it does not say when it ended
    elif step == hold.step:
        if _silent_since(memory, hold) is not None:
            memory.hold = hold = replace(hold, node=event.node)
        if not hold.told and memory.now - hold.since >= TOLD_AFTER_S:
            _tell_hold(memory, hold)


def _may_be_told(memory: MachineMemory, step: int) -> bool:
    """Whether an earlier term may have told a hold after this step: then its end is to be told too."""
    return memory.spec is not None and memory.spec.id.term < memory.term and memory.pace.step == step


def _silent_since(memory: MachineMemory, hold: Hold) -> float | None:
    """Time at which the node that shows a hold was heard last; None: it is heard."""
    node = memory.roster.nodes.get(hold.node)
    heard = hold.since if node is None else node.last_seen
    return heard if memory.now - heard > SILENT_BEATS * memory.job.elastic.heartbeat_s else None


def _tell_hold(memory: MachineMemory, hold: Hold) -> None:
    memory.hold = replace(hold, told=True)
    name = memory.job.name
    text = (
        f"all ranks are held after step {hold.step}: `picotron-ray debug ls {name}` says by what,"
        f" `picotron-ray debug continue {name}` ends it"
    )
    memory.alert("warning", HELD, text, step=hold.step, held=True)


def _note_debuggers(memory: MachineMemory, event: Heartbeat, spec: GenerationSpec) -> None:
    before, now = memory.debugged & event.steps.keys(), frozenset(event.debugged)
    if before == now:
        return
    ranks = {member.worker: rank for rank, member in enumerate(spec.members)}
    for worker in sorted((before ^ now) & ranks.keys()):
        _tell(memory, worker, ranks[worker], attached=worker in now)
    memory.debugged = (memory.debugged - before) | now
    if not memory.debugged:
        memory.pace = StepPace(memory.seen_step, memory.now, told_s=memory.step_s)
        if memory.window is not None:
            memory.window = replace(memory.window, step=memory.seen_step, at=memory.now)


def _tell(memory: MachineMemory, worker: str, rank: int, *, attached: bool) -> None:
    data = {"worker": worker, "rank": rank, "attached": attached}
    if attached:
        text = f"a debugger is attached to rank {rank} ({worker}): where it stops, all wait for it"
        memory.alert("warning", ATTACHED, text, **data)
    else:
        text = f"no debugger is attached to rank {rank} ({worker}) any more"
        memory.alert("info", ATTACHED, text, **data)
