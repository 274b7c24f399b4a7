"""Adaptation at the launch of a generation: the change that it begins with, or why none is made.

A failure goes before it (``policies.precedence``): a change that was to be made is dropped, and one that was
not judged yet is taken back, unless it was made for want of memory.
"""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator.adaptation import ADAPT
from picotron_ray.coordinator.adaptation_state import Change
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import GenerationId, Member
from picotron_ray.coordinator.plan_book import ReadyPlan
from picotron_ray.coordinator.policies.adaptation import (
    FOR_MEMORY,
    HOUR_S,
    began_of,
    owed,
    remembered,
    settled,
)
from picotron_ray.coordinator.policies.memory_limit import together
from picotron_ray.coordinator.policies.precedence import Concern, concern_of
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.failures import FailureKind

OWN_FAULT = (
    FailureKind.FAILED,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.NUMERICS,
    FailureKind.HANG,
    FailureKind.LATE,
)
"""Failures that a change may have caused: it is not tried again."""


def settle_change(memory: MachineMemory) -> None:
    """Drop what is under way where something more urgent ended the generation.

    A change whose generation was left before it was judged, for growth or a drain, is taken back too: on
    other workers its steps say nothing. It may be made again.
    """
    incident, state = memory.incident, memory.adaptation
    if (hurt := owed(memory.adapted)) is not None:
        memory.settings = hurt.settings  # also where its layout cannot be had back
    urgent = incident is not None and concern_of(incident.kind, incident.cause) < Concern.ADAPTATION
    if state.change is not None and not urgent:
        return
    why = memory.reason if incident is None else incident.cause
    if state.change is not None:
        memory.adaptation = replace(state, change=None)
        _not_made(memory, state.change, f"{why} goes before it")
    if hurt is not None:
        memory.adapted = (*memory.adapted[:-1], settled(hurt))
    trial = memory.adapted[-1] if memory.adapted else None
    if trial is None or trial.verdict != "trial" or trial.target.startswith(FOR_MEMORY):
        return
    memory.settings = trial.settings
    verdict = "back" if incident is not None and incident.kind in OWN_FAULT else "void"
    done = replace(settled(trial), verdict=verdict)  # type: ignore[arg-type]
    memory.adapted = (*memory.adapted[:-1], done)
    text = f"{trial.kind} is taken back: its generation ended before it was judged ({why})"
    data = {"action": verdict, "change": trial.kind, "began": began_of(trial)}
    memory.alert("warning", ADAPT, text, **data, step=memory.seen_step)


def _not_made(memory: MachineMemory, change: Change, why: str) -> None:
    """Tell that a change is not made; one that hurt is taken back even so, but for its layout."""
    kind, data = change.record.kind, {"action": "dropped", "change": change.record.kind}
    text = f"{kind} is not made: {why}"
    if change.record.verdict == "back":
        data = {"action": "none"}
        text = f"{kind} is taken back, but not to {change.layout}: {why}"
    memory.alert("warning", ADAPT, text, **data, step=memory.seen_step)


def changed_choice(
    memory: MachineMemory, usable: list[RosterWorker]
) -> tuple[ReadyPlan, list[RosterWorker]] | None:
    """The layout of the change under way and who may run it; None where there is none that these can run."""
    change = memory.adaptation.change
    if change is None:
        return None
    able = without_slow(usable, {*memory.adaptation.avoid, *change.avoid}, change.layout.world_size)
    if len(able) < change.layout.world_size:
        return None
    return ReadyPlan(change.layout, 0.0, change.reason), able


def without_slow(usable: list[RosterWorker], slow: set[str], needed: int) -> list[RosterWorker]:
    """Workers without those that are too slow, where the others are enough."""
    others = [worker for worker in usable if worker.name not in slow]
    return others if len(others) >= needed else usable


def fitting(choice: ReadyPlan, members: tuple[Member, ...], before: tuple[Member, ...]) -> ReadyPlan:
    """The choice with even rows where its members are not those whose speed was measured."""
    uneven = choice.layout.replica_rows or choice.layout.stage_blocks
    if not uneven or members == before:
        return choice
    return replace(choice, layout=replace(choice.layout, replica_rows=(), stage_blocks=()))


def begin_change(memory: MachineMemory, choice: ReadyPlan) -> None:
    """Have the generation that is launched run with the change's settings, and be judged."""
    state, change = memory.adaptation, memory.adaptation.change
    memory.adaptation = replace(state, change=None, asked_at=None, slow=(), findings=())
    if (hurt := owed(memory.adapted)) is not None:
        memory.adapted = (*memory.adapted[:-1], settled(hurt))
    if change is None:
        return
    if choice.reason != change.reason:
        _not_made(memory, change, f"too few workers are left for {change.layout}")
        return
    before = memory.spec.layout if memory.spec is not None else None
    recent = tuple(at for at in state.times if memory.now - at < HOUR_S)
    memory.adaptation = replace(
        memory.adaptation, times=(*recent, memory.now), avoid=(*state.avoid, *change.avoid)
    )
    if change.record.verdict == "trial":
        began = GenerationId(memory.term, memory.generations)
        record = replace(change.record, layout=before, settings=memory.settings, began=began)
        memory.adapted = remembered(memory.adapted, record)
    memory.settings = change.settings
    if change.strike is not None:
        memory.struck = together(memory.struck, (change.strike,))
