"""Housekeeping of the machine: nodes and workers that went, failed starts, growth, drains."""

from __future__ import annotations

from picotron_ray.coordinator.generation_stop import blame, kill, leave, sweep_dying
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import StartWorker
from picotron_ray.coordinator.policies import scale_up
from picotron_ray.coordinator.policies.membership import RosterWorker, starts
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind

REPLACE_AFTER_S = 2.0  # replacements wait for the survivors' first step, which they would slow down


def lose_node(memory: MachineMemory, node: str, reason: str, *, silent: bool = False) -> None:
    """Forget a node, and with it its workers and slots."""
    if node not in memory.roster.nodes:
        memory.roster.lose(node, silent=silent)
        return
    members = {member.worker for member in memory.unsettled()}
    gone = memory.roster.lose(node, silent=silent)
    memory.checkpoints.node_lost(node)
    memory.inventory.pop(node, None)
    memory.awaited.pop(node, None)
    text = f"node {node} lost ({reason}) with {len(gone)} workers"
    hit = [worker for worker in gone if worker.name in members]
    if hit and memory.in_generation:
        blame(memory, FailureKind.NODE_LOST, node, culprit=True, text=text)
    else:
        memory.alert(
            "warning", "failure", text, cause=FailureKind.NODE_LOST.value, target=node, step=memory.seen_step
        )


def worker_gone(memory: MachineMemory, worker: RosterWorker, cause: str) -> None:
    """Judge the exit of a worker that has just been taken off the roster."""
    if worker.state == "dying":
        return
    memory.deaths += 1
    text = f"worker {worker.name} on {worker.node} exited: {cause}"
    if worker.state == "starting":
        start_failed(memory, worker.node, text)
    elif worker.state == "busy" and memory.in_generation and worker.name not in memory.outcomes:
        blame(memory, FailureKind.WORKER_EXITED, worker.name, culprit=True, text=text, cause=cause)
    else:
        memory.alert("warning", "failure", text, cause=cause, target=worker.name, step=memory.seen_step)


def start_failed(memory: MachineMemory, node: str, text: str) -> None:
    """Put off the next start on a node whose worker did not start.

    While no generation runs and no worker is left, the run is given up after too many such failures.
    """
    memory.roster.start_failed(node, memory.now)
    memory.alert(
        "warning", "failure", text, cause=FailureKind.START_FAILED.value, target=node, step=memory.seen_step
    )
    limit = memory.job.elastic.max_failures_without_progress
    hopeless = any(n.failed_starts > limit for n in memory.roster.nodes.values())
    idle = memory.state in (MachineState.STARTING, MachineState.WAITING)
    if idle and hopeless and not memory.roster.in_state("idle", "starting"):
        memory.finish("failed", f"workers do not start: {text}")


def keep_house(memory: MachineMemory) -> None:
    """Do everything that time alone brings about."""
    for node in memory.roster.silent_nodes(memory.now, memory.job.elastic.node_timeout_s):
        lose_node(memory, node, f"silent for {memory.job.elastic.node_timeout_s:g} s", silent=True)
    workers = memory.roster.in_state("dying", "starting")
    if not workers:
        return
    sweep_dying(memory)
    for worker in workers:
        if worker.state == "starting" and memory.now - worker.since > memory.job.cluster.start_timeout_s:
            kill(memory, worker.name, "did not start in time")
            start_failed(memory, worker.node, f"worker {worker.name} did not start in time")


def wanted(memory: MachineMemory) -> int:
    """Number of workers that the run would have where there is room."""
    replaced = 0 if memory.job.elastic.replace_workers else memory.deaths
    return max(0, memory.job.cluster.max_workers - replaced)


def start_workers(memory: MachineMemory) -> None:
    """Fill up to the wanted number of workers, out of the way of a recovery."""
    settled = memory.progressed or memory.now - memory.launched_at >= REPLACE_AFTER_S
    if memory.state not in (MachineState.STARTING, MachineState.WAITING) and not (
        memory.state is MachineState.RUNNING and settled
    ):
        return
    for node in starts(memory.roster, wanted(memory), memory.now):
        memory.names += 1
        name = f"w{memory.term}-{memory.names}"
        memory.roster.workers[name] = RosterWorker(name, node, "starting", memory.now)
        memory.emit(StartWorker(name, node))


def step_running(memory: MachineMemory) -> None:
    """Stop a healthy generation for a request, a drain, or workers that would make it faster."""
    if memory.stop_requested:
        leave(memory, "stop requested")
    elif (reason := _drains(memory)) is not None or (reason := _grows(memory)) is not None:
        leave(memory, reason)


def _drains(memory: MachineMemory) -> str | None:
    """Move off draining nodes where the others can carry on alone."""
    assert memory.spec is not None
    draining = [node.name for node in memory.roster.nodes.values() if node.draining]
    if not draining:
        return None
    leaving = [member for member in memory.spec.members if member.node in draining]
    if not leaving:
        return None
    staying = [worker for worker in memory.living_members() if worker.node not in draining]
    staying += memory.roster.usable()
    most = min(len(staying), memory.job.cluster.max_workers)
    if most < memory.job.cluster.min_workers or memory.choice(staying, most) is None:
        return None
    return f"node {leaving[0].node} is draining"


def _grows(memory: MachineMemory) -> str | None:
    assert memory.spec is not None
    spares = memory.roster.usable() if memory.roster.in_state("idle") else []
    if not spares or memory.cap is not None:
        return None
    members = memory.living_members()
    size, most = len(members), min(len(members) + len(spares), memory.job.cluster.max_workers)
    present, bigger = (
        found and found[0]
        for found in (memory.choice(members, size), memory.choice([*members, *spares], most))
    )
    fits = bigger is not None and bigger.layout.world_size > size
    view = scale_up.GrowthView(
        enabled=memory.job.elastic.grow,
        ready_since=min(worker.since for worker in spares),
        starting=len(memory.roster.in_state("starting")),
        progressed=memory.progressed,
        steps_left=memory.job.steps - memory.seen_step,
        cost_s=present.cost_s if present is not None else float("inf"),
        bigger_cost_s=bigger.cost_s if bigger is not None and fits else None,
    )
    grow, why = scale_up.decide(memory.now, view)
    return (
        f"grow from {size} to {bigger.layout.world_size} workers: {why}"
        if grow and bigger is not None
        else None
    )
