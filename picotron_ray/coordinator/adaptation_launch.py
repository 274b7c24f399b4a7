"""Adaptation at the launch of a generation: the change that it begins with, or why none is made.

A failure goes before it (``policies.precedence``): a change that was to be made is dropped, and one that was
not judged yet is taken back, unless it was made for want of memory.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from picotron_ray.config.settings import with_settings
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.coordinator.adaptation import ADAPT
from picotron_ray.coordinator.adaptation_state import Change
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import GenerationId, Member
from picotron_ray.coordinator.plan_book import ReadyPlan
from picotron_ray.coordinator.policies.adaptation import (
    FOR_MEMORY,
    HOUR_S,
    avoided,
    began_of,
    owed,
    remembered,
    settled,
)
from picotron_ray.coordinator.policies.balance import evened, is_uneven, rows_for
from picotron_ray.coordinator.policies.memory_limit import together
from picotron_ray.coordinator.policies.precedence import Concern, concern_of
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import budget_bytes, memory_estimate

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
    able = [worker for worker in usable if worker.name not in change.record.avoid]
    able = without_slow(able, avoided(memory.adapted, memory.roster.workers), change.layout.world_size)
    if len(able) < change.layout.world_size:
        return None
    return ReadyPlan(change.layout, 0.0, change.reason), able


def without_slow(usable: list[RosterWorker], slow: set[str], needed: int) -> list[RosterWorker]:
    """Workers without those that are too slow, where the others are enough."""
    others = [worker for worker in usable if worker.name not in slow]
    return others if len(others) >= needed else usable


def carried(memory: MachineMemory, choice: ReadyPlan, members: tuple[Member, ...]) -> ReadyPlan:
    """The choice with rows and blocks by speed for these members, where they were shared out so before.

    Rows follow the survivors, and newcomers count as usual. Blocks stay where all members do.
    """
    spec = memory.spec
    source = choice.layout if is_uneven(choice.layout) or spec is None else spec.layout
    if spec is None or not is_uneven(source):
        return choice
    alike = all(getattr(source, axis) == getattr(choice.layout, axis) for axis in ("tp", "pp", "cp", "ep"))
    if not alike or choice.layout.placement:
        return replace(choice, layout=evened(choice.layout))
    layout, names = _as_wide(memory, evened(choice.layout), source), [one.worker for one in members]
    before = _shared_among(memory, source)
    if names == before and layout.dp == source.dp:
        blocks = source.stage_blocks if source.virtual_stages == layout.virtual_stages else ()
        layout = replace(layout, replica_rows=source.replica_rows, stage_blocks=blocks)
    elif source.replica_rows and before:
        layout = rows_for(layout, names, source, before, memory.job.data.global_batch)
    if layout_problems(with_settings(memory.job, memory.settings), layout):
        layout = evened(choice.layout)
    return replace(choice, layout=layout)


def _shared_among(memory: MachineMemory, source: Layout) -> list[str]:
    """Names by rank, among whom rows and blocks of a layout were shared out; empty: not known.

    A change that is taken back may have had other workers than the layout before it.
    """
    hurt = owed(memory.adapted)
    if hurt is not None and hurt.layout == source:
        return list(hurt.workers)
    return [] if memory.spec is None else [one.worker for one in memory.spec.members]


def _as_wide(memory: MachineMemory, layout: Layout, source: Layout) -> Layout:
    """The layout with the micro-batch that rows were shared out in, where memory is known to have room."""
    wide = replace(layout, micro_batch=source.micro_batch)
    limit = min((strike.limit_bytes for strike in memory.struck), default=0)
    estimate = memory_estimate(with_settings(memory.job, memory.settings), wide).total_bytes
    return layout if estimate > budget_bytes(memory.job, inf, limit) else wide


def forget_lost(memory: MachineMemory, layout: Layout) -> None:
    """Forget changes of rows or blocks that the next layout does without: they may be made anew at once."""
    before = None if memory.spec is None else memory.spec.layout
    if before is None:
        return
    lost = {
        kind
        for kind, had, has in (
            ("rows", before.replica_rows, layout.replica_rows),
            ("stages", before.stage_blocks, layout.stage_blocks),
        )
        if had and not has
    }
    memory.adapted = tuple(
        one for one in memory.adapted if one.kind not in lost or one.verdict != "kept" or one.avoid
    )


def begin_change(memory: MachineMemory, choice: ReadyPlan) -> None:
    """Have the generation that is launched run with the change's settings, and be judged."""
    state, change = memory.adaptation, memory.adaptation.change
    memory.adaptation = replace(state, change=None, asked=None, slow=(), findings=())
    if (hurt := owed(memory.adapted)) is not None:
        memory.adapted = (*memory.adapted[:-1], settled(hurt))
    if change is None or choice.reason != change.reason:
        forget_lost(memory, choice.layout)
    if change is None:
        return
    if choice.reason != change.reason:
        _not_made(memory, change, f"too few workers are left for {change.layout}")
        return
    before = memory.spec.layout if memory.spec is not None else None
    recent = tuple(at for at in state.times if memory.now - at < HOUR_S)
    memory.adaptation = replace(memory.adaptation, times=(*recent, memory.now))
    if change.record.verdict == "trial":
        began = GenerationId(memory.term, memory.generations)
        record = replace(change.record, layout=before, settings=memory.settings, began=began)
        if memory.spec is not None and is_uneven(memory.spec.layout):
            record = replace(record, workers=tuple(one.worker for one in memory.spec.members))
        memory.adapted = remembered(memory.adapted, record)
    memory.settings = change.settings
    if change.strike is not None:
        memory.struck = together(memory.struck, (change.strike,))
