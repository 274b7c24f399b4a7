"""Stops that a person makes: all ranks held at a step boundary, or a debugger attached to some.

Both are told once, with their end. Neither is a part of a step's time: what is measured of the generation
leaves a hold out, and is measured anew after a debugger, which may have stopped its rank anywhere.
"""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Heartbeat
from picotron_ray.coordinator.policies.pace import Hold, StepPace
from picotron_ray.coordinator.states import MachineState

HELD, ATTACHED = "held", "debugger"
"""Kinds of the alerts."""
TOLD_AFTER_S = 3.0
"""Length from which a hold is told: a recording that is saved holds all ranks for a moment."""


def note_stops(memory: MachineMemory, event: Heartbeat) -> None:
    """Note whom a node's heartbeat shows to be held, or to be debugged."""
    spec, hold = memory.spec, memory.hold
    if spec is None or memory.state is not MachineState.RUNNING:
        memory.hold = None
        return
    if hold is not None and hold.generation != (spec.id.term, spec.id.n):
        memory.hold = None
    if event.generation != spec.id:
        return
    _note_hold(memory, event)
    if event.debugged or memory.debugged:
        _note_debuggers(memory, event)


def _note_hold(memory: MachineMemory, event: Heartbeat) -> None:
    assert event.generation is not None
    hold, step = memory.hold, max(event.steps.values(), default=-1)
    if hold is None:
        if event.held and step == memory.seen_step:
            of = event.generation.term, event.generation.n
            memory.hold = Hold(of, event.node, step, memory.now)
        return
    held_s = memory.now - hold.since
    if memory.seen_step > hold.step or (event.node == hold.node and not event.held):
        memory.hold = None
        memory.pace = replace(memory.pace, at=memory.pace.at + held_s)
        if memory.window is not None:
            memory.window = replace(memory.window, at=memory.window.at + held_s)
        if hold.told:
            text = f"the run goes on after it was held for {held_s:.0f} s after step {hold.step}"
            memory.alert("info", HELD, text, step=hold.step, held_s=held_s, held=False)
    elif not hold.told and held_s >= TOLD_AFTER_S:
        memory.hold = replace(hold, told=True)
        name = memory.job.name
        text = (
            f"all ranks are held after step {hold.step}: `picotron-ray debug ls {name}` says by what,"
            f" `picotron-ray debug continue {name}` ends it"
        )
        memory.alert("warning", HELD, text, step=hold.step, held=True)


def _note_debuggers(memory: MachineMemory, event: Heartbeat) -> None:
    assert memory.spec is not None
    ranks = {member.worker: rank for rank, member in enumerate(memory.spec.members)}
    before = memory.debugged & event.steps.keys()
    now = ranks.keys() & set(event.debugged)
    for worker in sorted((before ^ now) & ranks.keys()):
        _tell(memory, worker, ranks[worker], attached=worker in now)
    memory.debugged = frozenset((memory.debugged - before) & ranks.keys() | now)
    if before and not memory.debugged:
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
