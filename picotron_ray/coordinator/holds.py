"""Stops that a person makes: all ranks held at a step boundary, or a debugger attached to some.

Both are told once, with their end. Neither is a part of a step's time: what is measured of the generation
leaves a hold out, and is measured anew after a debugger, which may have stopped its rank anywhere.
"""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import GenerationSpec, Heartbeat
from picotron_ray.coordinator.policies.pace import Hold, StepPace
from picotron_ray.coordinator.states import MachineState

HELD, ATTACHED = "held", "debugger"
"""Kinds of the alerts."""
TOLD_AFTER_S = 3.0
"""Length from which a hold is told: a recording that is saved holds all ranks for a moment."""


def note_stops(memory: MachineMemory, event: Heartbeat) -> None:
    """Note whom a node's heartbeat shows to be held, or to be debugged, in the running generation."""
    if memory.state is not MachineState.RUNNING:
        if memory.hold is not None:
            _end_hold(memory, memory.hold)
        return
    if memory.spec is None or event.generation != memory.spec.id:
        return
    _note_hold(memory, event)
    _note_debuggers(memory, event, memory.spec)


def _note_hold(memory: MachineMemory, event: Heartbeat) -> None:
    hold, step = memory.hold, max(event.steps.values(), default=-1)
    if hold is None:
        if event.held and step == memory.seen_step:
            memory.hold = Hold(event.node, step, memory.now)
    elif memory.seen_step > hold.step or (event.node == hold.node and not event.held):
        _end_hold(memory, hold)
    elif not hold.told and memory.now - hold.since >= TOLD_AFTER_S:
        memory.hold = replace(hold, told=True)
        name = memory.job.name
        text = (
            f"all ranks are held after step {hold.step}: `picotron-ray debug ls {name}` says by what,"
            f" `picotron-ray debug continue {name}` ends it"
        )
        memory.alert("warning", HELD, text, step=hold.step, held=True)


def _end_hold(memory: MachineMemory, hold: Hold) -> None:
    held_s, memory.hold = memory.now - hold.since, None
    memory.pace = replace(memory.pace, at=memory.pace.at + held_s)
    if memory.window is not None:
        memory.window = replace(memory.window, at=memory.window.at + held_s)
    if hold.told:
        text = f"the run goes on after it was held for {held_s:.0f} s after step {hold.step}"
        memory.alert("info", HELD, text, step=hold.step, held_s=held_s, held=False)


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
