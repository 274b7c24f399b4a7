"""Recovery, from the end of one generation to the next: inventory, restore point, members, launch.

The one place that decides what happens next; every way out of a generation leads here.
"""

from __future__ import annotations

from typing import Literal

from picotron_ray.config.settings import replaced_by
from picotron_ray.coordinator.adaptation_launch import (
    begin_change,
    carried,
    changed_choice,
    settle_change,
    without_slow,
)
from picotron_ray.coordinator.agreed_state import agreed_state, replay_by
from picotron_ray.coordinator.expert_placement import placed_experts
from picotron_ray.coordinator.final_wait import out_of_patience
from picotron_ray.coordinator.generation_stop import kill, note_unsaved
from picotron_ray.coordinator.lineage import on_lineage
from picotron_ray.coordinator.machine_memory import START, MachineMemory
from picotron_ray.coordinator.messages import (
    AppendGeneration,
    CollectInventory,
    GenerationId,
    GenerationSpec,
    Member,
    Rewind,
    RunGeneration,
    Source,
)
from picotron_ray.coordinator.out_of_memory import given_up
from picotron_ray.coordinator.plan_book import ReadyPlan
from picotron_ray.coordinator.policies.adaptation import avoided
from picotron_ray.coordinator.policies.membership import choose_members
from picotron_ray.coordinator.policies.pace import StepPace
from picotron_ray.coordinator.policies.placement import spread
from picotron_ray.coordinator.policies.restore_point import newest_commit
from picotron_ray.coordinator.policies.rewind import by_rule
from picotron_ray.coordinator.policies.state_copies import with_copies
from picotron_ray.coordinator.resting import commit_state, rest
from picotron_ray.coordinator.resume_state import (
    follow,
    held_slots,
    lineage_from,
    newest_state,
    obeyed_step,
    owed_rewind,
    rewinds_before,
    rewound,
    settle_history,
)
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import CorruptError
from picotron_ray.failures import FailureKind, Remedy

MOST_ASKED = 3  # rounds after which a node's inventory is done without
COMMIT_PATIENCE_S = 5.0  # longest wait for the reply to a commit that would save steps


def collect(memory: MachineMemory) -> None:
    """Ask every living node what it holds."""
    memory.go(MachineState.COLLECTING)
    memory.request += 1
    memory.inventory.clear()
    memory.outdated.clear()
    memory.doubted.clear()
    memory.awaited = dict.fromkeys(memory.roster.nodes, memory.request)
    memory.asked = 0
    memory.patient_until = memory.now + COMMIT_PATIENCE_S
    _ask(memory)


def _ask(memory: MachineMemory) -> None:
    memory.asked += 1
    memory.deadline = memory.now + memory.answer_s(len(memory.awaited))
    memory.emit(*(CollectInventory(node, request) for node, request in sorted(memory.awaited.items())))


def ask_again(memory: MachineMemory, node: str) -> None:
    """Ask a node anew, because its slots have changed while inventories are taken.

    It has just joined, or the last worker that wrote into its slots has ended.
    """
    if node in memory.roster.nodes:
        if node in memory.inventory:
            memory.outdated[node] = memory.inventory.pop(node)
        memory.request += 1
        memory.awaited[node] = memory.request
        alone = memory.now + memory.job.elastic.interrupt_timeout_s
        memory.deadline = max(memory.deadline or 0.0, alone)  # many others may be awaited as well
        memory.emit(CollectInventory(node, memory.request))


def step_collecting(memory: MachineMemory) -> None:
    """Decide once every node has answered, or has been asked in vain, and nobody writes any more.

    Slots that are being saved are waited for.
    """
    if memory.rescued or any(worker.writing for worker in memory.roster.in_state("dying")):
        return
    if memory.awaited and memory.deadline is not None and memory.now >= memory.deadline:
        if memory.asked < MOST_ASKED:
            _ask(memory)
            return
        _do_without(memory)
    if not memory.awaited:
        _decide(memory)


def _do_without(memory: MachineMemory) -> None:
    """Go on with what the awaited nodes told earlier in this round, if anything.

    What is gone of it is found where it is read, and passed over.
    """
    told = {node: memory.outdated[node] for node in memory.awaited if node in memory.outdated}
    text = f"no inventory from {', '.join(sorted(memory.awaited))}: going on without"
    if told:
        text += f", and with what {', '.join(sorted(told))} told before"
    memory.alert("error", "inventory", text)
    memory.inventory.update(told)
    memory.awaited.clear()


def _ask_who_sealed(memory: MachineMemory, point: Source) -> bool:
    """Ask nodes again, once, that told of a newer whole state and whose inventories lack their part of it.

    They may have answered before it was sealed. Returns whether any was asked.
    """
    newest = None if memory.distrust_slots else memory.checkpoints.newest_whole()
    if newest is None or newest[0] <= point.step or not on_lineage(memory.history, newest[1], newest[0]):
        return False
    lacking = []
    for node, slots in memory.checkpoints.seals[newest].held.items():
        told = {slot.identity for slot in memory.inventory.get(node, ())}
        if (
            node in memory.roster.nodes
            and node not in memory.doubted
            and not told.issuperset(slot.identity for slot in slots)
        ):
            lacking.append(node)
    memory.doubted.update(lacking)
    for node in lacking:
        ask_again(memory, node)
    return bool(lacking)


def _decide(memory: MachineMemory) -> None:
    settle_history(memory)
    try:
        point, why = newest_state(memory)
    except LookupError as error:
        memory.finish("failed", str(error))
        return
    except CorruptError as error:
        memory.finish("storage", str(error))
        return
    if _ask_who_sealed(memory, point):
        return
    if memory.now < memory.patient_until and _commit_would_help(memory, point):
        return
    note_unsaved(memory, point.step)
    numerics = memory.verdict and (
        memory.incident is None or memory.incident.kind is FailureKind.NUMERICS
    )  # else something went before it, and the next generation computes the step again
    asked = by_rule(memory.bad) and memory.incident is None  # a failure on the way goes before it
    bad = memory.bad if numerics or asked else owed_rewind(memory)
    older = rewound(memory, bad)
    if (numerics or bad) and older is None:
        _finalise(memory, point, "failed")
        return
    if memory.incident is not None and not memory.incident.counted and not _apply_remedy(memory, point):
        return
    rewinds = rewinds_before(memory)
    if (sound := agreed_state(memory)) is not None:
        point, why = sound
    elif older is not None and not memory.stop_requested:
        point, why, rewind = older
        rewinds = (*rewinds, rewind)
    elif memory.distrust_slots:
        point, why = newest_state(memory)
    # commits that are in doubt are void only once a generation goes on from before them
    if (memory.stop_requested and sound is None) or point.step >= memory.job.steps:
        _finalise(memory, point, "finished" if point.step >= memory.job.steps else "stopped")
        return
    settle_change(memory)
    if memory.paused:
        rest(memory, point)
        return
    picked = pick(memory)
    if picked is None and (why_not := given_up(memory)):
        memory.verdict = why_not
        _finalise(memory, point, "failed")
        return
    if picked is None:
        _report_wait(memory)
        memory.go(MachineState.WAITING)
        memory.held_step = point.step
        if point.step > memory.checkpoints.committed:  # the nodes that hold it may go meanwhile
            commit_state(memory, point)
        return
    _launch(memory, point, why, rewinds, *picked)


def _report_wait(memory: MachineMemory) -> None:
    ready, plans = len(memory.roster.usable()), memory.plans
    if ready >= memory.job.cluster.min_workers and plans.missed:
        memory.alert("info", "planner", f"{ready} workers ready; waiting for their layout to be planned")
        return
    text = f"{ready} workers ready, too few to go on; waiting for more"
    memory.alert("warning", "waiting", text, ready=ready)


def _commit_would_help(memory: MachineMemory, point: Source) -> bool:
    """Whether a commit newer than ``point`` is on its way into the log; resuming now would make it void."""
    commit = memory.appends.newest_commit()
    return (
        commit is not None
        and commit.step > point.step
        and on_lineage(memory.history, commit.generation, commit.step)
    )


def _apply_remedy(memory: MachineMemory, point: Source) -> bool:
    """Count the incident and change what it asks to change; False where the run is given up."""
    incident = memory.incident
    assert incident is not None
    incident.counted = True
    memory.remedy, why = memory.breaker.record(incident.kind, max(memory.seen_step, point.step), memory.now)
    if memory.remedy is Remedy.GIVE_UP:
        memory.finish("failed", f"{why}; last: {memory.reason}")
        return False
    worker = memory.roster.workers.get(incident.target)
    suspect = incident.culprit and worker is not None and worker.state == "idle"
    if memory.remedy is Remedy.EXCLUDE and suspect and worker is not None:
        kill(memory, worker.name, f"suspect: {why}")
    # a commit that storage does not hand out is no remedy
    climbed = memory.remedy in (Remedy.COMMIT, Remedy.SHRINK)  # a rung keeps what the one below it changed
    memory.distrust_slots = climbed and not memory.storage_fails
    if memory.remedy is Remedy.SHRINK:
        memory.cap = max(memory.job.cluster.min_workers, len(memory.roster.usable()) // 2)
    if memory.remedy is not Remedy.RETRY:
        memory.alert("warning", "remedy", f"{memory.remedy.value}: {why}", remedy=memory.remedy.name)
    return True


def pick(memory: MachineMemory) -> tuple[ReadyPlan, tuple[Member, ...]] | None:
    """Pick the layout and members that the ready workers allow now; None where they are too few."""
    usable = memory.roster.usable()
    least, most = memory.job.cluster.min_workers, min(len(usable), memory.job.cluster.max_workers)
    if most < least:
        return None
    found = changed_choice(memory, usable) if memory.cap is None else None
    if memory.cap is not None:
        found = memory.choice(usable, min(most, memory.cap))
    if found is None:
        found = memory.choice(usable, most)
    if found is None:
        return None
    choice, able = found
    previous = () if memory.spec is None else memory.spec.members
    able = without_slow(able, avoided(memory.adapted, memory.roster.workers), choice.layout.world_size)
    members = choose_members(able, choice.layout.world_size, previous)
    domains = {node.name: node.domain for node in memory.roster.nodes.values() if node.domain}
    placed = spread(members, choice.layout, domains)
    return carried(memory, choice, placed), placed


def _launch(
    memory: MachineMemory,
    point: Source,
    why: str,
    rewinds: tuple[Rewind, ...],
    choice: ReadyPlan,
    members: tuple[Member, ...],
) -> None:
    """Start the next generation; its log entry is written meanwhile."""
    memory.generations += 1
    begin_change(memory, choice)
    point = with_copies(point, held_slots(memory))
    replay = replay_by(memory, point, members, choice.layout)
    spec = GenerationSpec(
        GenerationId(memory.term, memory.generations),
        members,
        placed_experts(memory, choice.layout, point, replay),
        point,
        memory.reason,
        lineage_from(memory, point),
        memory.struck,
        rewinds,
        obeyed_step(memory),
        memory.settings,
        memory.adapted,
        replaced_by(memory.job, memory.settings),
        replay,
    )
    memory.go(MachineState.RUNNING)
    memory.emit(RunGeneration(spec))
    for member in members:
        memory.roster.workers[member.worker].state = "busy"
    _report(memory, spec, why)
    _report_plan(memory, choice)
    follow(memory, spec)
    memory.layouts[spec.id] = spec.layout
    memory.outcomes.clear()
    memory.seen_step, memory.launched_at, memory.progressed = spec.resume_step, memory.now, False
    memory.pace = StepPace(spec.resume_step, memory.now)
    memory.debugged = frozenset()
    memory.begun.clear()
    memory.unseen.clear()
    memory.verdict, memory.bad, memory.divergence = "", None, None
    memory.rule_found = None
    memory.incident, memory.boundary_asked, memory.distrust_slots, memory.rewind = None, False, False, None
    memory.failing_until, memory.rested_at, memory.resumed_with = None, None, 0
    memory.exhausted, memory.exhausted_until = False, None
    memory.checkpoints.rewound(spec)
    if memory.checkpoints.pending is None:
        memory.appends.drop_commits()
    commit = newest_commit(memory.commits, spec, memory.bad_manifests)
    memory.checkpoints.committed = 0 if commit is None else commit.step
    memory.appends.push(AppendGeneration(spec))


def _report(memory: MachineMemory, spec: GenerationSpec, why: str) -> None:
    data = {
        "generation": str(spec.id),
        "layout": str(spec.layout),
        "members": [member.worker for member in spec.members],
        "resume_step": spec.resume_step,
        "restored_from": spec.source.kind,
        "why": why,
    }
    text = f"generation {spec.id}: {len(spec.members)} workers, {spec.layout}, from {why}"
    incident = memory.incident
    if incident is None:
        known = (
            memory.boundary_asked or memory.reason == START
        )  # told as the one before was stopped, or nothing to tell
        memory.alert("info", "generation", text if known else f"{text} ({memory.reason})", **data)
        return
    lost = max(0, memory.seen_step - spec.resume_step)
    memory.alert(
        "warning",
        "recovery",
        f"{text}; {lost} steps lost",  # to what the failure's own line has told
        **data,
        cause=incident.cause,
        target=incident.target,
        step=incident.step,
        lost_steps=lost,
        remesh_s=memory.now - incident.at,
    )


def _report_plan(memory: MachineMemory, choice: ReadyPlan) -> None:
    """Tell why this layout was taken, and what the runner-up lost by."""
    if memory.plans.choose is not None:
        return
    text = f"plan: {choice.reason}" + (f"; next {choice.runner_up}" if choice.runner_up else "")
    data = {"layout": str(choice.layout), "cost_s": choice.cost_s, "planned": choice.planned}
    memory.alert("info", "plan", text, **data, reason=choice.reason, runner_up=choice.runner_up)


def _finalise(memory: MachineMemory, point: Source, status: Literal["finished", "stopped", "failed"]) -> None:
    """Commit the last state; what is already committed, or was never trained, needs no commit."""
    memory.go(MachineState.FINALISING)
    memory.final = (status, point.step)
    memory.incident = None
    commit_state(memory, point)


def step_finalising(memory: MachineMemory) -> None:
    """Finish once the last state is durable; go back where its slots were lost meanwhile."""
    assert memory.final is not None
    status, step = memory.final
    job = memory.checkpoints.pending
    if memory.checkpoints.committed >= step:
        memory.finish(status, memory.verdict if status == "failed" else f"step {step}")
    elif job is None:
        memory.reason = "the last state was lost before it was committed"
        collect(memory)
    else:
        out_of_patience(memory, job.state)
