"""Housekeeping of the machine: nodes and workers that went, failed starts, growth."""

from __future__ import annotations

from picotron_ray.coordinator.adaptation import adapt
from picotron_ray.coordinator.calibration import calibrate
from picotron_ray.coordinator.drains import reason_to_leave, save
from picotron_ray.coordinator.generation_stop import blame, kill, leave, sweep_dying
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import KillWorker, NodeJoined, StartWorker
from picotron_ray.coordinator.out_of_memory import exit_kind
from picotron_ray.coordinator.planning import better_plan
from picotron_ray.coordinator.policies import scale_up
from picotron_ray.coordinator.policies.adaptation import avoided
from picotron_ray.coordinator.policies.membership import starts
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.coordinator.rescues import forget_rescues
from picotron_ray.coordinator.rule_findings import obey_rule
from picotron_ray.coordinator.states import MachineState
from picotron_ray.coordinator.unseen_members import end_unseen
from picotron_ray.failures import FailureKind

REPLACE_AFTER_S = 2.0  # replacements wait for the survivors' first step, which they would slow down
WOKEN_S = 2.0  # as much of its sleep as the clock of the machine counts (LONGEST_GAP_S)
NOT_REPLACED = "not-replaced"  # kind of the alerts that tell how many workers were lost for good


def lose_node(memory: MachineMemory, node: str, reason: str, *, silent: bool = False) -> None:
    """Forget a node, and with it its workers and slots."""
    memory.unheard.discard(node)
    forget_rescues(memory, node)
    if not silent:
        memory.away.pop(node, None)
    if node not in memory.roster.nodes:
        memory.roster.lose(node, silent=silent)
        return
    if silent:
        memory.away.setdefault(node, {}).update(memory.checkpoints.pinned_on(node))
    gone = memory.roster.lose(node, silent=silent)
    memory.checkpoints.node_lost(node)
    memory.inventory.pop(node, None)
    memory.outdated.pop(node, None)
    memory.awaited.pop(node, None)
    text = f"node {node} lost ({reason}) with {len(gone)} workers"
    hit = any(memory.is_member(worker.name) and worker.name not in memory.outcomes for worker in gone)
    if hit and memory.in_generation:
        blame(memory, FailureKind.NODE_LOST, node, culprit=True, text=text)
    else:
        memory.alert(
            "warning", "failure", text, cause=FailureKind.NODE_LOST.value, target=node, step=memory.seen_step
        )


def take_in(memory: MachineMemory, event: NodeJoined) -> None:
    """Have the idle workers of a node join that is heard late, but those that were ordered to die."""
    memory.unheard.discard(event.node)
    for name in event.idle:
        if name in memory.doomed:
            memory.emit(KillWorker(name, "was ordered to die before"))
        elif name not in memory.roster.workers:
            memory.roster.workers[name] = RosterWorker(name, event.node, "idle", memory.now)


def worker_gone(memory: MachineMemory, worker: RosterWorker, cause: str) -> None:
    """Judge the exit of a worker that has just been taken off the roster."""
    if worker.state == "dying":
        return
    count_death(memory)
    text = f"worker {worker.name} on {worker.node} exited: {cause}"
    if worker.state == "starting":
        start_failed(memory, worker.node, text)
    elif worker.state == "busy" and memory.in_generation and worker.name not in memory.outcomes:
        kind = exit_kind(memory, worker, cause)
        blame(memory, kind, worker.name, culprit=True, text=text, cause=cause)
    else:
        memory.alert("warning", "failure", text, cause=cause, target=worker.name, step=memory.seen_step)


def count_death(memory: MachineMemory) -> None:
    """Count a worker that was lost without its node; where none is replaced, a later term has to know."""
    memory.deaths += 1
    if not memory.job.elastic.replace_workers:
        text = f"{memory.deaths} lost and not replaced (elastic.replace_workers): {wanted(memory)} are wanted"
        memory.alert("info", NOT_REPLACED, text, deaths=memory.deaths)


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


def bar(memory: MachineMemory, worker: RosterWorker, why: str) -> None:
    """Start nothing more on the node of a worker that may not take part, and end that one.

    The run is given up where no other node is left. The node is tried again after it was lost, or by the next
    term.
    """
    kill(memory, worker.name, f"refused: {why}")
    node = memory.roster.nodes.get(worker.node)
    if node is None or node.barred:
        return
    node.barred = True
    text = f"node {worker.node} may not take part: {why}"
    memory.alert("error", "refused", text, node=worker.node)
    idle = memory.state in (MachineState.STARTING, MachineState.WAITING)
    others = any(not other.barred for other in memory.roster.nodes.values())
    if idle and not others and not memory.job.cluster.autoscale:
        memory.finish("failed", text)


def _silence_limit_s(memory: MachineMemory) -> float:
    """Silence after which a node is lost.

    Just after the coordinator's own sleep it is longer: what came meanwhile may still wait to be read.
    """
    limit_s = memory.job.elastic.node_timeout_s
    return limit_s + WOKEN_S if memory.now < memory.woke_at + WOKEN_S else limit_s


def keep_house(memory: MachineMemory) -> None:
    """Do everything that time alone brings about."""
    for node in memory.roster.silent_nodes(memory.now, _silence_limit_s(memory)):
        lose_node(memory, node, f"silent for {memory.job.elastic.node_timeout_s:g} s", silent=True)
    end_unseen(memory)
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
    """Stop a healthy generation for a request, a drain, a layout that would make it faster, or a change.

    Where nothing stops it, a checkpoint that was asked for before it trained is made up for.
    """
    if watch_launch(memory):
        return
    calibrate(memory)
    if memory.stop_requested:
        leave(memory, "stop requested")
    elif (
        (reason := obey_rule(memory)) is not None
        or (reason := _drains(memory)) is not None
        or (reason := _grows(memory)) is not None
        or (reason := better_plan(memory)) is not None
        or (reason := adapt(memory)) is not None
    ):
        leave(memory, reason)
    elif memory.save_asked and memory.progressed:
        memory.save_asked = False
        save(memory)


def watch_launch(memory: MachineMemory) -> bool:
    """Abort a generation that a member has not entered in time; True where it was.

    From its first phase on a member is judged by its page. Before that nobody would notice that the call
    never reached it, or that the rendezvous store was waited for in vain. One that was told to leave before
    it began has nothing to answer.
    """
    assert memory.spec is not None
    limit_s = memory.job.elastic.first_step_timeout_s
    if memory.now - memory.launched_at < limit_s or memory.progressed:
        return False
    late = [m for m in memory.unsettled() if m.worker not in memory.begun]
    for member in late[:1]:
        text = f"worker {member.worker} has not begun generation {memory.spec.id} within {limit_s:g} s"
        blame(memory, FailureKind.LATE, member.worker, culprit=False, text=text)
    return bool(late)


def _drains(memory: MachineMemory) -> str | None:
    if not memory.roster.leaving:
        return None
    return reason_to_leave(memory, len(starts(memory.roster, wanted(memory), memory.now)))


def _grows(memory: MachineMemory) -> str | None:
    assert memory.spec is not None
    slow = avoided(memory.adapted, memory.roster.workers)
    idle = memory.roster.usable() if memory.roster.in_state("idle") else []
    spares = [worker for worker in idle if worker.name not in slow]
    if not spares or memory.cap is not None or not memory.job.elastic.grow or not memory.progressed:
        return None
    key = (*memory.roster.version, memory.plans.changes, memory.spec.id)
    if memory.growth_of == key:  # seen before, and too small a gain then
        return None
    members = memory.living_members()
    size, most = len(members), min(len(members) + len(spares), memory.job.cluster.max_workers)
    present, bigger = (
        found and found[0]
        for found in (memory.choice(members, size), memory.planned([*members, *spares], most))
    )
    fits = bigger is not None and bigger.layout.world_size > size
    view = scale_up.GrowthView(
        enabled=memory.job.elastic.grow,
        ready_since=min(worker.since for worker in spares),
        starting=memory.roster.workers.count("starting"),
        progressed=memory.progressed,
        steps_left=memory.job.steps - memory.seen_step,
        cost_s=present.cost_s if present is not None else float("inf"),
        bigger_cost_s=bigger.cost_s if bigger is not None and fits else None,
    )
    grow, why = scale_up.decide(memory.now, view)
    if not grow and view.bigger_cost_s is not None and not view.starting:
        memory.growth_of = key
    return (
        f"grow from {size} to {bigger.layout.world_size} workers: {why}"
        if grow and bigger is not None
        else None
    )
