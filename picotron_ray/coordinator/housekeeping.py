"""What the machine looks after between events: silence, starts, growth, drains, storage."""

from __future__ import annotations

from picotron_ray.coordinator.generation_stop import blame, kill, leave, sweep_dying
from picotron_ray.coordinator.machine_memory import Context
from picotron_ray.coordinator.messages import StartWorker
from picotron_ray.coordinator.policies import scale_up
from picotron_ray.coordinator.policies.membership import Worker, starts
from picotron_ray.coordinator.states import State

REPLACE_AFTER_S = 2.0  # replacements wait for the survivors' first step, which they would slow down


def lose_node(ctx: Context, node: str, reason: str, *, silent: bool = False) -> None:
    """A node is gone, and with it its workers and slots."""
    if node not in ctx.roster.nodes:
        ctx.roster.lose(node, silent=silent)
        return
    members = {member.worker for member in ctx.unsettled()}
    gone = ctx.roster.lose(node, silent=silent)
    ctx.saves.node_lost(node)
    ctx.inventory.pop(node, None)
    ctx.awaited.pop(node, None)
    text = f"node {node} lost ({reason}) with {len(gone)} workers"
    hit = [worker for worker in gone if worker.name in members]
    if hit and ctx.in_generation:
        blame(ctx, "node lost", node, culprit=True, text=text)
    else:
        ctx.alert("warning", "failure", text, cause="node lost", target=node, step=ctx.seen_step)


def worker_gone(ctx: Context, worker: Worker, cause: str) -> None:
    """A worker that has just been taken off the roster exited."""
    if worker.state == "dying":
        return
    ctx.deaths += 1
    text = f"worker {worker.name} on {worker.node} exited: {cause}"
    if worker.state == "starting":
        start_failed(ctx, worker.node, text)
    elif worker.state == "busy" and ctx.in_generation and worker.name not in ctx.outcomes:
        blame(ctx, cause, worker.name, culprit=True, text=text)
    else:
        ctx.alert("warning", "failure", text, cause=cause, target=worker.name, step=ctx.seen_step)


def start_failed(ctx: Context, node: str, text: str) -> None:
    """A start that fails is tried again later on; before any generation ran, not for ever."""
    ctx.roster.start_failed(node, ctx.now)
    ctx.alert("warning", "failure", text, cause="start_failed", target=node, step=ctx.seen_step)
    worst = max((n.failed_starts for n in ctx.roster.nodes.values()), default=0)
    limit = ctx.job.elastic.max_failures_without_progress
    idle = ctx.state in (State.STARTING, State.WAITING)
    if idle and worst > limit and not ctx.roster.in_state("idle", "starting"):
        ctx.finish("failed", f"workers do not start: {text}")


def upkeep(ctx: Context) -> None:
    """Everything that time alone brings about."""
    for node in ctx.roster.silent_nodes(ctx.now, ctx.job.elastic.node_timeout_s):
        lose_node(ctx, node, f"silent for {ctx.job.elastic.node_timeout_s:g} s", silent=True)
    workers = ctx.roster.in_state("dying", "starting")
    if not workers:
        return
    sweep_dying(ctx)
    for worker in workers:
        if worker.state == "starting" and ctx.now - worker.since > ctx.job.cluster.start_timeout_s:
            kill(ctx, worker.name, "did not start in time")
            start_failed(ctx, worker.node, f"worker {worker.name} did not start in time")


def wanted(ctx: Context) -> int:
    """How many workers the run would have where there is room."""
    replaced = 0 if ctx.job.elastic.replace_workers else ctx.deaths
    return max(0, ctx.job.cluster.max_workers - replaced)


def start_workers(ctx: Context) -> None:
    """Fill up to the wanted number of workers, out of the way of a recovery."""
    settled = ctx.progressed or ctx.now - ctx.launched_at >= REPLACE_AFTER_S
    if ctx.state not in (State.STARTING, State.WAITING) and not (ctx.state is State.RUNNING and settled):
        return
    for node in starts(ctx.roster, wanted(ctx), ctx.now):
        ctx.names += 1
        name = f"w{ctx.term}-{ctx.names}"
        ctx.roster.workers[name] = Worker(name, node, "starting", ctx.now)
        ctx.emit(StartWorker(name, node))


def step_running(ctx: Context) -> None:
    """Reasons to stop a healthy generation: a request, a drain, workers that would make it faster."""
    if ctx.stop_requested:
        leave(ctx, "stop requested")
    elif (reason := _drains(ctx)) is not None or (reason := _grows(ctx)) is not None:
        leave(ctx, reason)


def _drains(ctx: Context) -> str | None:
    """Move off draining nodes where the others can carry on alone."""
    assert ctx.spec is not None
    draining = [node.name for node in ctx.roster.nodes.values() if node.draining]
    if not draining:
        return None
    leaving = [member for member in ctx.spec.members if member.node in draining]
    if not leaving:
        return None
    staying = len(ctx.spec.members) - len(leaving) + len(ctx.roster.usable())
    if staying < ctx.job.cluster.min_workers or ctx.choice(staying) is None:
        return None
    return f"node {leaving[0].node} is draining"


def _grows(ctx: Context) -> str | None:
    assert ctx.spec is not None
    spares = ctx.roster.usable() if ctx.roster.in_state("idle") else []
    if not spares or ctx.cap is not None:
        return None
    size = len(ctx.spec.members)
    present, bigger = ctx.choice(size), ctx.choice(min(size + len(spares), ctx.job.cluster.max_workers))
    fits = bigger is not None and bigger.layout.world_size > size
    view = scale_up.GrowthView(
        enabled=ctx.job.elastic.grow,
        ready_since=min(worker.since for worker in spares),
        starting=len(ctx.roster.in_state("starting")),
        progressed=ctx.progressed,
        steps_left=ctx.job.steps - ctx.seen_step,
        cost_s=present.cost_s if present is not None else float("inf"),
        bigger_cost_s=bigger.cost_s if bigger is not None and fits else None,
    )
    grow, why = scale_up.decide(ctx.now, view)
    return (
        f"grow from {size} to {bigger.layout.world_size} workers: {why}"
        if grow and bigger is not None
        else None
    )
