"""What each event changes in the machine's memory; what follows from it is derived afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.checkpoint_tracker import known_layouts
from picotron_ray.coordinator.generation_stop import blame, kill
from picotron_ray.coordinator.housekeeping import lose_node, worker_gone
from picotron_ray.coordinator.lineage import on_lineage
from picotron_ray.coordinator.machine_memory import Context
from picotron_ray.coordinator.policies.membership import Worker
from picotron_ray.coordinator.policies.restore_point import newest_commit
from picotron_ray.coordinator.recovery import ask_again
from picotron_ray.coordinator.states import State


def begin(ctx: Context, event: m.Begin) -> None:
    """Take over from what the log and the agents say: adopt what runs, else start."""
    if ctx.state is not State.NEW:
        return
    specs = [*event.generations, *([event.running] if event.running else [])]
    ctx.term, ctx.commits = event.term, list(event.commits)
    ctx.spec = max(specs, key=lambda spec: spec.id, default=None)
    ctx.layouts.update(known_layouts(specs))
    commit = newest_commit(ctx.commits, ctx.spec)
    ctx.saves.committed = 0 if commit is None else commit.step
    adopted = event.running if event.running == ctx.spec else None
    _take_over(ctx, event, adopted)
    if adopted is not None:
        _adopt(ctx, adopted, logged={spec.id for spec in event.generations})
        return
    _plan_rewind(ctx, event)
    if commit is not None and commit.step >= ctx.job.steps and ctx.rewind is None:
        ctx.finish("finished", f"step {commit.step}: all {ctx.job.steps} steps were committed before")
        return
    ctx.go(State.STARTING)
    ctx.deadline = ctx.now + ctx.job.cluster.start_timeout_s


def _take_over(ctx: Context, event: m.Begin, adopted: m.GenerationSpec | None) -> None:
    """Enter the living workers; one that is still in a generation of the past cannot be used again."""
    members = set() if adopted is None else {member.worker for member in adopted.members}
    busy = {entry.worker: entry.generation for entry in event.busy}
    for member in event.workers:
        if member.node not in ctx.roster.nodes:
            ctx.roster.join(member.node, sum(w.node == member.node for w in event.workers), ctx.now)
            _release_committed(ctx, member.node)
        worker = Worker(member.worker, member.node, "idle", ctx.now)
        ctx.roster.workers[worker.name] = worker
        at = busy.get(worker.name)
        if worker.name in members and at in (None, adopted.id if adopted else None):
            worker.state = "busy"
        elif at is not None:
            worker.state = "busy"
            kill(ctx, worker.name, f"still in generation {at}, which is over")


def _plan_rewind(ctx: Context, event: m.Begin) -> None:
    """``checkpoint.resume_step`` is obeyed once per run, not again after each restart."""
    step = ctx.job.checkpoint.resume_step
    done = any(spec.source.kind == "commit" and spec.resume_step == step for spec in event.generations)
    if step is not None and not done:
        ctx.rewind = step


def _adopt(ctx: Context, spec: m.GenerationSpec, logged: set[m.GenerationId]) -> None:
    """Carry on with a generation of the term before; it is entered in the log where it is missing."""
    ctx.go(State.RUNNING)
    ctx.seen_step, ctx.launched_at = spec.resume_step, ctx.now
    ctx.emit(m.RunGeneration(spec, adopt=True))
    heard = set(ctx.roster.nodes)
    ctx.alert("info", "adopted", f"adopted generation {spec.id}: {len(spec.members)} workers, {spec.layout}")
    if spec.id not in logged:
        ctx.appends.push(m.AppendGeneration(spec))
    for member in spec.members:
        if member.worker in ctx.roster.workers:
            continue
        if member.node in heard:
            text = f"worker {member.worker} on {member.node} was gone when the coordinator came back"
            blame(ctx, "killed", member.worker, culprit=True, text=text)
        else:  # not heard is not lost: its call fails, or it stays silent, if it is
            ctx.roster.join(member.node, sum(other.node == member.node for other in spec.members), ctx.now)
            ctx.roster.workers[member.worker] = Worker(member.worker, member.node, "busy", ctx.now)


def node_joined(ctx: Context, event: m.NodeJoined) -> None:
    if event.refused:
        if ctx.refused.get(event.node) != event.refused:
            ctx.refused[event.node] = event.refused
            ctx.alert("warning", "refused", f"node {event.node} may not take part: {event.refused}")
        return
    if not ctx.roster.join(event.node, event.capacity, ctx.now):
        return
    _release_committed(ctx, event.node)
    ctx.alert(
        "info", "join", f"node {event.node} joined with room for {event.capacity} workers", node=event.node
    )
    if ctx.state is State.COLLECTING:
        ask_again(ctx, event.node)


def _release_committed(ctx: Context, node: str) -> None:
    """Pins of an earlier term, whose commit was never followed by its release, are undone."""
    commit = newest_commit(ctx.commits, ctx.spec, ctx.bad_manifests)
    if commit is not None:
        ctx.emit(m.Release(node, commit.generation, commit.step, commit.step))


def node_lost(ctx: Context, event: m.NodeLost) -> None:
    lose_node(ctx, event.node, event.reason)


def worker_ready(ctx: Context, event: m.WorkerReady) -> None:
    worker = ctx.roster.workers.get(event.worker)
    if worker is None:
        ctx.emit(m.KillWorker(event.worker, "not known to this coordinator"))
    elif worker.state == "starting":
        worker.state, worker.since = "idle", ctx.now
        if (node := ctx.roster.nodes.get(worker.node)) is not None:
            node.failed_starts = 0


def worker_exited(ctx: Context, event: m.WorkerExited) -> None:
    worker = ctx.roster.workers.pop(event.worker, None)
    if worker is None:
        return
    worker_gone(ctx, worker, event.cause)
    if worker.writing and ctx.state is State.COLLECTING:
        ask_again(ctx, worker.node)


def heartbeat(ctx: Context, event: m.Heartbeat) -> None:
    """Sign of life and progress; a node lost by silence alone is taken back, without its old workers."""
    node = ctx.roster.nodes.get(event.node)
    if node is None:
        silent = ctx.roster.silent.get(event.node)
        if silent is None:
            return
        capacity, workers = silent
        node_joined(ctx, m.NodeJoined(event.node, capacity))
        for name in workers:
            ctx.roster.workers[name] = Worker(name, event.node, "busy", ctx.now)
            kill(ctx, name, "its node was counted as lost")
        return
    node.last_seen = ctx.now
    before = ctx.seen_step
    if ctx.spec is not None and event.generation == ctx.spec.id and event.steps:
        progress(ctx, max(event.steps.values()))
    ctx.quiet = ctx.seen_step == before


def progress(ctx: Context, step: int) -> None:
    """Note finished steps of the present generation."""
    if ctx.spec is None or step <= ctx.seen_step:
        return
    ctx.seen_step, ctx.progressed = step, True
    ctx.emit(*ctx.saves.release_void())
    if ctx.breaker.progressed(step):
        ctx.cap = None


def outcome(ctx: Context, event: m.Outcome) -> None:
    """A member left the present generation; anything but an orderly end is a failure of it."""
    worker = ctx.roster.workers.get(event.worker)
    if ctx.spec is None or event.generation != ctx.spec.id or not ctx.is_member(event.worker):
        return
    if worker is None or event.worker in ctx.outcomes or not ctx.in_generation:
        return
    ctx.outcomes[event.worker] = event
    if worker.state == "busy":
        worker.state, worker.since = "idle", ctx.now
    progress(ctx, event.step)
    if event.kind in ("finished", "interrupted"):
        if ctx.state is State.RUNNING:
            ctx.reason = f"members left: {event.kind} {event.detail}".strip()
            ctx.go(State.LEAVING)
    elif event.kind == "peer_lost":
        blame(ctx, "peer lost", event.worker, culprit=False, text=f"worker {event.worker} lost a peer")
    elif event.detail.startswith("corrupt:"):
        _quarantine(ctx, event.worker, event.detail.removeprefix("corrupt:").strip())
    else:
        text = f"worker {event.worker} failed: {event.detail}"
        blame(ctx, event.detail.split(":")[0] or "failed", event.worker, culprit=True, text=text)


def stalled(ctx: Context, event: m.Stalled) -> None:
    """Who is stuck shows when all are told to leave: it alone does not answer."""
    running = ctx.state in (State.RUNNING, State.LEAVING)
    if not running or ctx.spec is None or event.generation != ctx.spec.id or not ctx.is_member(event.worker):
        return
    text = f"worker {event.worker} has been in phase {event.phase} for {event.waited_s:.1f} s"
    blame(ctx, "hang", event.worker, culprit=False, text=text)


def _quarantine(ctx: Context, worker: str, name: str) -> None:
    """What failed its digest is never offered again; the next rung of the ladder is used."""
    assert ctx.spec is not None
    source = ctx.spec.source
    for slot in source.slots:
        if slot.slot == name and (slot.node, name) not in ctx.bad_slots:
            ctx.bad_slots.add((slot.node, name))
            ctx.emit(m.Quarantine(slot.node, name))
    known = any(name == slot for _, slot in ctx.bad_slots)
    if name == source.manifest:
        ctx.bad_manifests.add(name)
        known = True
    text = f"worker {worker} found {name} corrupt: it is not used again"
    blame(ctx, "corrupt" if known else "failed", worker, culprit=True, text=text)


def snapshot_sealed(ctx: Context, event: m.SnapshotSealed) -> None:
    if event.node not in ctx.roster.nodes or event.generation not in ctx.layouts:
        return
    state = (event.step, event.generation)
    if not on_lineage(ctx.spec, event.generation, event.step):
        ctx.saves.voided(event.node, state)
        return
    if ctx.spec is not None and event.generation == ctx.spec.id:
        progress(ctx, event.step)
    ctx.emit(*ctx.saves.sealed(state, event.node, event.slots, ctx.layouts[event.generation]))


def inventory(ctx: Context, event: m.Inventory) -> None:
    if ctx.state is State.COLLECTING and ctx.awaited.get(event.node) == event.request:
        del ctx.awaited[event.node]
        ctx.inventory[event.node] = event.slots


def uploaded(ctx: Context, event: m.Uploaded) -> None:
    if event.error:
        ctx.alert("warning", "storage", f"upload of step {event.step} on {event.node} failed: {event.error}")
    if event.error.startswith("corrupt:"):
        slot = event.error.removeprefix("corrupt:").strip()
        ctx.bad_slots.add((event.node, slot))
        ctx.emit(m.Quarantine(event.node, slot))
        ctx.saves.slot_lost(event.node, slot)
    elif ctx.saves.uploaded(event, ctx.now):
        ctx.appends.push(ctx.saves.commit())


def appended(ctx: Context, event: m.Appended) -> None:
    if event.fenced:
        ctx.finish("fenced", "a newer coordinator has taken over; this one stops")
        return
    if event.error:
        ctx.alert("warning", "storage", f"log entry ({event.kind}) failed: {event.error}")
        if event.kind == "commit" and ctx.saves.outdated((event.step, event.generation)):
            ctx.appends.settle(event, ctx.now)  # no longer on its way ...
            ctx.appends.drop_commits()  # ... and not to be tried again: a newer checkpoint takes its place
            return
    entry = ctx.appends.settle(event, ctx.now)
    if not isinstance(entry, m.AppendCommit):
        return
    ctx.commits.append(m.Commit(event.step, event.generation, event.manifest, event.seq))
    if not on_lineage(ctx.spec, event.generation, event.step):
        return
    ctx.saves.committed = max(ctx.saves.committed, event.step)
    ctx.alert("info", "commit", f"step {event.step} committed", step=event.step, manifest=event.manifest)
    ctx.emit(*ctx.saves.settled((event.step, event.generation), list(ctx.roster.nodes)))


def drain_notice(ctx: Context, event: m.DrainNotice) -> None:
    node = ctx.roster.nodes.get(event.node)
    if node is None or node.draining:
        return
    node.draining = True
    ctx.alert("warning", "drain", f"node {event.node} is to go", node=event.node, deadline=event.deadline)
    if ctx.state is State.RUNNING and ctx.spec is not None:
        _take_snapshot(ctx)


def user_request(ctx: Context, event: m.UserRequest) -> None:
    if event.what == "stop":
        ctx.stop_requested = True
    elif ctx.state is State.RUNNING:
        _take_snapshot(ctx)


def _take_snapshot(ctx: Context) -> None:
    assert ctx.spec is not None
    ctx.emit(m.TakeSnapshot(ctx.spec.id, tuple(member.worker for member in ctx.spec.members)))


def tick(ctx: Context, event: m.Tick) -> None:
    """Nothing by itself: what is due is found afterwards."""


HANDLERS: dict[type[Any], Callable[[Context, Any], None]] = {
    m.Begin: begin,
    m.NodeJoined: node_joined,
    m.NodeLost: node_lost,
    m.WorkerReady: worker_ready,
    m.WorkerExited: worker_exited,
    m.Stalled: stalled,
    m.Heartbeat: heartbeat,
    m.Outcome: outcome,
    m.SnapshotSealed: snapshot_sealed,
    m.Inventory: inventory,
    m.Uploaded: uploaded,
    m.Appended: appended,
    m.DrainNotice: drain_notice,
    m.UserRequest: user_request,
    m.Tick: tick,
}
