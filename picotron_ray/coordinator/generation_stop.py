"""How a generation comes to its end: in order at a step boundary, or torn out of its collectives."""

from __future__ import annotations

from picotron_ray.coordinator.machine_memory import Context, Incident
from picotron_ray.coordinator.messages import Interrupt, KillWorker
from picotron_ray.coordinator.states import State

MOST_KILLS = 3  # a worker ordered to die this often without an answer counts as dead
SETTLE_FACTOR = 5.0  # x interrupt_timeout_s: from the first orderly outcome to the last one


def leave(ctx: Context, reason: str) -> None:
    """Ask all members to stop together after the step at hand."""
    ctx.reason, ctx.boundary_asked = reason, True
    ctx.alert(
        "info", "boundary", f"stopping generation {ctx.spec.id if ctx.spec else '?'} at a boundary: {reason}"
    )
    ctx.go(State.LEAVING)
    _interrupt(ctx, "boundary")


def blame(ctx: Context, kind: str, target: str, *, culprit: bool, text: str) -> None:
    """Note a failure of the running generation; the first one aborts it.

    A member that lost a peer only suffers: the peer's own end, where it is heard of later, replaces it.
    """
    assert ctx.spec is not None
    ctx.alert("warning", "failure", text, cause=kind, target=target, step=ctx.seen_step, culprit=culprit)
    incident = ctx.incident
    if incident is None:
        ctx.incident = Incident(kind, target, ctx.seen_step, ctx.now, culprit)
    elif culprit and not incident.culprit:
        incident.kind, incident.target, incident.culprit = kind, target, True
    if ctx.state in (State.RUNNING, State.LEAVING):
        ctx.reason = text
        ctx.go(State.ABORTING)
        ctx.deadline = ctx.now + ctx.job.elastic.interrupt_timeout_s
        _interrupt(ctx, "hard")


def _interrupt(ctx: Context, mode: str) -> None:
    assert ctx.spec is not None
    wait_s = ctx.job.elastic.interrupt_timeout_s
    ctx.remind_at = ctx.now + (wait_s / 2 if mode == "hard" else wait_s)
    for member in ctx.unsettled():
        if ctx.roster.workers[member.worker].state != "dying":
            ctx.emit(Interrupt(member.worker, ctx.spec.id, "hard" if mode == "hard" else "boundary"))


def step_leaving(ctx: Context) -> bool:
    """True once all members have left; who lags behind after the first one left aborts the generation."""
    unsettled = ctx.unsettled()
    if not unsettled:
        return True
    if ctx.outcomes and ctx.deadline is None:
        ctx.deadline = ctx.now + SETTLE_FACTOR * ctx.job.elastic.interrupt_timeout_s
    if ctx.deadline is not None and ctx.now >= ctx.deadline:
        worker = unsettled[0].worker
        blame(ctx, "late", worker, culprit=True, text=f"worker {worker} did not stop with the others")
    elif ctx.boundary_asked and ctx.now >= ctx.remind_at:
        _interrupt(ctx, "boundary")
    return False


def step_aborting(ctx: Context) -> bool:
    """True once all members have settled; who does not in time is killed."""
    unsettled = ctx.unsettled()
    if not unsettled:
        return True
    if ctx.deadline is not None and ctx.now >= ctx.deadline:
        ctx.deadline = None
        for member in unsettled:
            _find_culprit(ctx, member.worker)
            kill(ctx, member.worker, f"did not leave generation {ctx.spec.id if ctx.spec else '?'} in time")
    elif ctx.deadline is not None and ctx.now >= ctx.remind_at:
        _interrupt(ctx, "hard")
    return False


def _find_culprit(ctx: Context, worker: str) -> None:
    """Who does not answer is to blame where so far only its victims were heard."""
    incident = ctx.incident
    if incident is not None and not incident.culprit:
        incident.kind, incident.target, incident.culprit = "hang", worker, True


def kill(ctx: Context, name: str, reason: str) -> None:
    """Order a worker's death; it counts as alive until its exit is reported or it was ordered too often."""
    worker = ctx.roster.workers[name]
    worker.writing = worker.writing or worker.state == "busy"
    worker.state, worker.since = "dying", ctx.now
    worker.kills += 1
    ctx.emit(KillWorker(name, reason))


def sweep_dying(ctx: Context) -> None:
    """Repeat the orders to die that were not answered; in the end do without the answer."""
    for worker in ctx.roster.in_state("dying"):
        if ctx.now - worker.since < ctx.job.elastic.interrupt_timeout_s:
            continue
        if worker.kills < MOST_KILLS:
            kill(ctx, worker.name, "still there")
        else:
            del ctx.roster.workers[worker.name]
            ctx.alert("error", "lost", f"worker {worker.name} on {worker.node} never confirmed its death")
