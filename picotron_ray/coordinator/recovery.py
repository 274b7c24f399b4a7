"""From the end of one generation to the start of the next: inventory, restore point, members, launch.

The one place that decides what happens next; every way out of a generation leads here.
"""

from __future__ import annotations

from picotron_ray.coordinator.generation_stop import kill
from picotron_ray.coordinator.lineage import descend, on_lineage
from picotron_ray.coordinator.machine_memory import Choice, Context
from picotron_ray.coordinator.messages import (
    AppendGeneration,
    CollectInventory,
    GenerationId,
    GenerationSpec,
    Member,
    RunGeneration,
    Source,
)
from picotron_ray.coordinator.policies.failure import Remedy
from picotron_ray.coordinator.policies.membership import choose_members
from picotron_ray.coordinator.policies.restore_point import newest_commit, restore_point
from picotron_ray.coordinator.states import State

MOST_ASKED = 3  # rounds after which a node's inventory is done without
COMMIT_PATIENCE_S = 5.0  # longest wait for the reply to a commit that would save steps
FINAL_PATIENCE_S = 60.0  # least time for which storage may fail before a run ends with "storage"


def collect(ctx: Context) -> None:
    """Ask every living node what it holds."""
    ctx.go(State.COLLECTING)
    ctx.request += 1
    ctx.inventory.clear()
    ctx.awaited = dict.fromkeys(ctx.roster.nodes, ctx.request)
    ctx.asked = 0
    ctx.patient_until = ctx.now + COMMIT_PATIENCE_S
    _ask(ctx)


def _ask(ctx: Context) -> None:
    ctx.asked += 1
    ctx.deadline = ctx.now + ctx.job.elastic.interrupt_timeout_s
    ctx.emit(*(CollectInventory(node, request) for node, request in sorted(ctx.awaited.items())))


def ask_again(ctx: Context, node: str) -> None:
    """A node came in, or its last writer ended, while inventories are taken: what it holds now counts."""
    if node in ctx.roster.nodes:
        ctx.inventory.pop(node, None)
        ctx.request += 1
        ctx.awaited[node] = ctx.request
        ctx.deadline = ctx.now + ctx.job.elastic.interrupt_timeout_s
        ctx.emit(CollectInventory(node, ctx.request))


def step_collecting(ctx: Context) -> None:
    """Decide once every node has answered, or has been asked in vain, and nobody writes any more."""
    if any(worker.writing for worker in ctx.roster.in_state("dying")):
        return
    if ctx.awaited and ctx.deadline is not None and ctx.now >= ctx.deadline:
        if ctx.asked < MOST_ASKED:
            _ask(ctx)
            return
        ctx.alert(
            "error", "inventory", f"no inventory from {', '.join(sorted(ctx.awaited))}: going on without"
        )
        ctx.awaited.clear()
    if not ctx.awaited:
        _decide(ctx)


def _decide(ctx: Context) -> None:
    try:
        point, why = _restore_point(ctx)
    except LookupError as error:
        ctx.finish("failed", str(error))
        return
    if ctx.now < ctx.patient_until and _commit_would_help(ctx, point):
        return
    if ctx.incident is not None and not ctx.incident.counted and not _apply_remedy(ctx, point):
        return
    if ctx.distrust_slots:
        point, why = _restore_point(ctx)
    if ctx.stop_requested or point.step >= ctx.job.steps:
        _finalise(ctx, point)
        return
    picked = pick(ctx)
    if picked is None:
        ready = len(ctx.roster.usable())
        ctx.alert(
            "warning", "waiting", f"{ready} workers ready, too few to go on; waiting for more", ready=ready
        )
        ctx.go(State.WAITING)
        return
    _launch(ctx, point, why, *picked)


def _commit_would_help(ctx: Context, point: Source) -> bool:
    """Whether a commit newer than ``point`` is on its way into the log; resuming now would make it void."""
    commit = ctx.appends.newest_commit()
    return (
        commit is not None
        and commit.step > point.step
        and on_lineage(ctx.spec, commit.generation, commit.step)
    )


def _restore_point(ctx: Context) -> tuple[Source, str]:
    slots = [
        slot
        for node, held in ctx.inventory.items()
        if node in ctx.roster.nodes
        for slot in held
        if (node, slot.slot) not in ctx.bad_slots
    ]
    if ctx.rewind is not None:
        commits = [commit for commit in ctx.commits if commit.step == ctx.rewind]
        point, why = restore_point((), {}, commits, ctx.spec, bad_manifests=ctx.bad_manifests)
        if point.kind != "commit":
            steps = sorted({commit.step for commit in ctx.commits})
            raise LookupError(f"checkpoint.resume_step: saw {ctx.rewind}, allowed are the commits at {steps}")
        return point, f"checkpoint.resume_step={ctx.rewind}; {why}"
    return restore_point(
        slots,
        ctx.layouts,
        ctx.commits,
        ctx.spec,
        bad_manifests=ctx.bad_manifests,
        use_slots=not ctx.distrust_slots,
    )


def _apply_remedy(ctx: Context, point: Source) -> bool:
    """Count the incident and change what it asks to change; False where the run is given up."""
    incident = ctx.incident
    assert incident is not None
    incident.counted = True
    ctx.remedy, why = ctx.breaker.record(incident.kind, max(ctx.seen_step, point.step))
    if ctx.remedy is Remedy.GIVE_UP:
        ctx.finish("failed", f"{why}; last: {ctx.reason}")
        return False
    worker = ctx.roster.workers.get(incident.target)
    suspect = incident.culprit and worker is not None and worker.state == "idle"
    if ctx.remedy is Remedy.EXCLUDE and suspect and worker is not None:
        kill(ctx, worker.name, f"suspect: {why}")
    ctx.distrust_slots = ctx.remedy is Remedy.COMMIT
    if ctx.remedy is Remedy.SHRINK:
        ctx.cap = max(ctx.job.cluster.min_workers, len(ctx.roster.usable()) // 2)
    if ctx.remedy is not Remedy.RETRY:
        ctx.alert("warning", "remedy", f"{ctx.remedy.value}: {why}", remedy=ctx.remedy.name)
    return True


def pick(ctx: Context) -> tuple[Choice, tuple[Member, ...]] | None:
    """The layout and members that the ready workers allow now; None where they are too few."""
    usable = ctx.roster.usable()
    least, most = ctx.job.cluster.min_workers, min(len(usable), ctx.job.cluster.max_workers)
    if most < least:
        return None
    choice = None
    if ctx.cap is not None:
        choice = ctx.choice(min(most, ctx.cap))
    if choice is None:
        choice = ctx.choice(most)
    if choice is None:
        return None
    previous = () if ctx.spec is None else ctx.spec.members
    return choice, choose_members(usable, choice.layout.world_size, previous)


def _launch(ctx: Context, point: Source, why: str, choice: Choice, members: tuple[Member, ...]) -> None:
    """Start the next generation; its log entry is written meanwhile."""
    ctx.generations += 1
    spec = GenerationSpec(
        GenerationId(ctx.term, ctx.generations),
        members,
        choice.layout,
        point,
        ctx.reason,
        descend(ctx.spec, point),
    )
    ctx.go(State.RUNNING)
    ctx.emit(RunGeneration(spec))
    for member in members:
        ctx.roster.workers[member.worker].state = "busy"
    _report(ctx, spec, why)
    ctx.spec, ctx.layouts[spec.id] = spec, spec.layout
    ctx.outcomes.clear()
    ctx.seen_step, ctx.launched_at, ctx.progressed = spec.resume_step, ctx.now, False
    ctx.incident, ctx.boundary_asked, ctx.distrust_slots, ctx.rewind = None, False, False, None
    ctx.saves.rewound(spec)
    if ctx.saves.job is None:
        ctx.appends.drop_commits()
    commit = newest_commit(ctx.commits, spec, ctx.bad_manifests)
    ctx.saves.committed = 0 if commit is None else commit.step
    ctx.appends.push(AppendGeneration(spec))


def _report(ctx: Context, spec: GenerationSpec, why: str) -> None:
    data = {
        "generation": str(spec.id),
        "layout": str(spec.layout),
        "members": [member.worker for member in spec.members],
        "resume_step": spec.resume_step,
        "restored_from": spec.source.kind,
        "why": why,
    }
    text = f"generation {spec.id}: {len(spec.members)} workers, {spec.layout}, from {why}"
    incident = ctx.incident
    if incident is None:
        ctx.alert("info", "generation", f"{text} ({ctx.reason})", **data)
        return
    lost = max(0, ctx.seen_step - spec.resume_step)
    ctx.alert(
        "warning",
        "recovery",
        f"{text}; {lost} steps lost to: {ctx.reason}",
        **data,
        cause=incident.kind,
        target=incident.target,
        step=incident.step,
        lost_steps=lost,
        remesh_s=ctx.now - incident.at,
    )


def _finalise(ctx: Context, point: Source) -> None:
    """Commit the last state; what is already committed, or was never trained, needs no commit."""
    status = "finished" if point.step >= ctx.job.steps else "stopped"
    ctx.go(State.FINALISING)
    ctx.deadline = ctx.now + max(FINAL_PATIENCE_S, 2 * ctx.job.storage.retry_deadline_s)
    ctx.final = (status, point.step)  # type: ignore[assignment]
    ctx.incident = None
    if point.kind == "slots" and point.generation is not None:
        state = (point.step, point.generation)
        if ctx.saves.job is not None and ctx.saves.job.state != state:
            ctx.saves.job = None
            ctx.appends.drop_commits()
        ctx.saves.start(state, point.slots)
    else:
        ctx.saves.committed = point.step


def step_finalising(ctx: Context) -> None:
    """Finish once the last state is durable; go back where its slots were lost meanwhile."""
    assert ctx.final is not None
    status, step = ctx.final
    job = ctx.saves.job
    if ctx.saves.committed >= step:
        ctx.finish(status, f"step {step}")
    elif job is None:
        ctx.reason = "the last state was lost before it was committed"
        collect(ctx)
    elif ctx.now >= (ctx.deadline or 0.0) and (job.errors or ctx.appends.attempt):
        ctx.finish("storage", f"step {step} could not be committed: storage kept failing")
