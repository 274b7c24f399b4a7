"""Handlers of events: each changes the machine's memory.

The consequences are derived from the whole memory afterwards (``machine.advance``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.drains import notice
from picotron_ray.coordinator.fenced_end import fenced_end
from picotron_ray.coordinator.figures_heard import finding, measured
from picotron_ray.coordinator.final_wait import refuse, take_up
from picotron_ray.coordinator.generation_stop import blame, fenced, kill, note_bad_step
from picotron_ray.coordinator.holds import note_stops
from picotron_ray.coordinator.housekeeping import bar, lose_node, take_in, worker_gone
from picotron_ray.coordinator.machine_memory import MachineMemory, ReadSlots
from picotron_ray.coordinator.operator_orders import order, send_away_again, user_request
from picotron_ray.coordinator.out_of_memory import OOM, late_verdict, strike_layout
from picotron_ray.coordinator.planning import planned
from picotron_ray.coordinator.policies.restore_point import newest_commit
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.coordinator.recovery import ask_again
from picotron_ray.coordinator.replica_check import note_divergence
from picotron_ray.coordinator.rescues import note_rescues
from picotron_ray.coordinator.resume_state import counts, forget_older
from picotron_ray.coordinator.rule_findings import rule_finding
from picotron_ray.coordinator.states import MachineState
from picotron_ray.coordinator.term_begin import begin, release_committed
from picotron_ray.coordinator.unseen_members import look_for_members
from picotron_ray.failures import FailureKind

AGENT_PATIENCE = 6.0  # x node_timeout_s: longest wait for an agent's restart


def node_joined(memory: MachineMemory, event: m.NodeJoined) -> None:
    if event.node in memory.freed:
        return
    if event.refused:
        refuse(memory, event)
        return
    memory.refused.pop(event.node, None)
    new = memory.roster.join(event.node, event.capacity, memory.now, event.traits)
    if not new and event.node not in memory.unheard:
        return
    take_in(memory, event)
    take_up(memory, event.kept, event.kept_by)
    release_committed(memory, event.node)
    send_away_again(memory, event.node)
    text = f"node {event.node} joined with room for {event.capacity} workers"
    memory.alert("info", "join", text, node=event.node)
    if memory.state is MachineState.COLLECTING:
        ask_again(memory, event.node)
    for (step, generation), slots in sorted(memory.away.pop(event.node, {}).items()):
        snapshot_sealed(memory, m.SnapshotSealed(event.node, generation, step, slots))


def node_lost(memory: MachineMemory, event: m.NodeLost) -> None:
    lose_node(memory, event.node, event.reason)


def worker_ready(memory: MachineMemory, event: m.WorkerReady) -> None:
    worker = memory.roster.workers.get(event.worker)
    if worker is None:
        memory.emit(m.KillWorker(event.worker, "not known to this coordinator"))
    elif event.refused:
        bar(memory, worker, event.refused)
    elif worker.state == "starting":
        worker.state, worker.since = "idle", memory.now
        if (node := memory.roster.nodes.get(worker.node)) is not None:
            node.failed_starts = 0


def worker_exited(memory: MachineMemory, event: m.WorkerExited) -> None:
    worker = memory.roster.workers.pop(event.worker, None)
    if worker is None:
        late_verdict(memory, event)
        return
    rescued = memory.rescued.pop(event.worker, "")
    worker_gone(memory, worker, event.cause)
    if (worker.writing or rescued) and memory.state is MachineState.COLLECTING:
        ask_again(memory, worker.node)


def heartbeat(memory: MachineMemory, event: m.Heartbeat) -> None:
    """Note a sign of life and progress, the members that are missing from it, and those that stand still."""
    sign_of_life(memory, event)
    look_for_members(memory, event)
    note_rescues(memory, event)
    note_stops(memory, event)


def sign_of_life(memory: MachineMemory, event: m.Heartbeat) -> None:
    """Note a sign of life and progress.

    A node that was lost by silence alone is taken back in. Its old workers are killed first. So is a worker
    that counts as dead, because no order to die was answered: it lives on where its node heard none of them.
    """
    node = memory.roster.nodes.get(event.node)
    if node is None:
        silent = memory.roster.silent.get(event.node)
        if silent is None:
            return
        was, workers = silent
        known = {name: getattr(was, name) for name in ("device_bytes", "domain", "has_gpus", "hardware")}
        back = m.NodeJoined(event.node, was.capacity, **known)
        node_joined(memory, back)
        for name in workers:
            memory.roster.workers[name] = RosterWorker(name, event.node, "busy", memory.now)
            kill(memory, name, "its node was counted as lost")
        _end_strangers(memory, event)
        return
    node.last_seen, node.agent_gone_at = memory.now, None
    _end_strangers(memory, event)
    before = memory.seen_step
    if memory.spec is not None and event.generation == memory.spec.id and event.steps:
        memory.begun.update(event.steps)
        progress(memory, max(event.steps.values()))
    memory.quiet = memory.seen_step == before


def _end_strangers(memory: MachineMemory, event: m.Heartbeat) -> None:
    for name in (*event.steps, *event.others):
        if name not in memory.roster.workers and event.node not in memory.unheard:
            memory.emit(m.KillWorker(name, "counts as dead, or is not known, and lives"))


def agent_restarting(memory: MachineMemory, event: m.AgentRestarting) -> None:
    """Wait for an agent as long as it usually takes, many times over: workers and slots outlive it."""
    memory.roster.agent_restarts(event.node, memory.now, AGENT_PATIENCE * memory.job.elastic.node_timeout_s)
    memory.quiet = True


def progress(memory: MachineMemory, step: int) -> None:
    """Note finished steps of the present generation."""
    if memory.spec is None or step <= memory.seen_step:
        return
    memory.seen_step, memory.progressed = step, True
    memory.held = memory.held or step > memory.spec.resume_step  # who only waits to restore says that one
    memory.pace = memory.pace.seen(step, memory.now)
    memory.emit(*memory.checkpoints.release_void())
    if memory.breaker.progressed(step):
        memory.cap = None


def outcome(memory: MachineMemory, event: m.Outcome) -> None:
    """Note that a member left the present generation; anything but an orderly end is a failure of it."""
    worker = memory.roster.workers.get(event.worker)
    if memory.spec is None or event.generation != memory.spec.id or not memory.is_member(event.worker):
        return
    if worker is None or event.worker in memory.outcomes or not memory.in_generation:
        return
    memory.outcomes[event.worker] = event
    memory.expert_loads |= {told.layer: told.loads for told in event.expert_loads}
    if memory.state is MachineState.ABORTING:
        memory.heard(len(memory.spec.members) - len(memory.outcomes))
    if worker.state == "busy":
        worker.state, worker.since = "idle", memory.now
    progress(memory, event.step)
    if event.kind in ("finished", "interrupted"):
        if memory.state is MachineState.RUNNING:
            memory.reason = f"members left: {event.kind} {event.detail}".strip()
            memory.go(MachineState.LEAVING)
    elif event.kind is FailureKind.PEER_LOST:
        text = f"worker {event.worker} lost a peer"
        blame(memory, event.kind, event.worker, culprit=False, text=text)
    elif event.kind is FailureKind.NUMERICS:
        memory.held = True
        note_bad_step(memory, event)
    elif event.kind is FailureKind.DIVERGED:
        memory.held = True
        note_divergence(memory, event)
    elif event.detail.startswith("corrupt:"):
        _quarantine(memory, event.worker, event.detail.removeprefix("corrupt:").strip())
    elif event.detail.startswith("unreachable:"):
        _pass_over(memory, event.worker, event.detail.removeprefix("unreachable:").strip())
    else:
        text = f"worker {event.worker} failed: {event.detail}"
        cause, kind = event.detail.split(":")[0], FailureKind.FAILED
        if cause == OOM and strike_layout(memory, memory.spec.layout, worker.node, on_device=True):
            kind = FailureKind.OUT_OF_MEMORY
        blame(memory, kind, event.worker, culprit=True, text=text, cause=cause)


def stalled(memory: MachineMemory, event: m.Stalled) -> None:
    """Abort the generation of a member whose phase lasts too long.

    The stuck one shows when all are told to leave: it alone does not answer. A worker that was taken for
    idle and stands in a generation of an earlier term was called for it late: nobody else will ever come.
    """
    worker = memory.roster.workers.get(event.worker)
    if worker is not None and worker.state == "idle" and event.generation.term < memory.term:
        worker.state = "busy"  # it may write until it is dead
        kill(memory, event.worker, f"still in generation {event.generation}, which is over")
        return
    running = memory.state in (MachineState.RUNNING, MachineState.LEAVING)
    if (
        not running
        or memory.spec is None
        or event.generation != memory.spec.id
        or not memory.is_member(event.worker)
    ):
        return
    text = f"worker {event.worker} has been in phase {event.phase} for {event.waited_s:.1f} s"
    blame(memory, FailureKind.HANG, event.worker, culprit=False, text=text)


def _quarantine(memory: MachineMemory, worker: str, name: str) -> None:
    """Set aside data that failed its digest; the next rung of the ladder is used instead."""
    assert memory.spec is not None
    source = memory.spec.source
    named = _read_slots(memory).by_name.get(name, ())
    for identity in named:
        if identity not in memory.bad_slots:
            memory.bad_slots.add(identity)
            memory.emit(m.Quarantine(*identity))
    known = bool(named)
    if name == source.manifest:
        memory.bad_manifests.add(name)
        known = True
    text = f"worker {worker} found {name} corrupt: it is not used again"
    kind = FailureKind.CORRUPT if known else FailureKind.FAILED
    blame(memory, kind, worker, culprit=True, text=text)


def _read_slots(memory: MachineMemory) -> ReadSlots:
    assert memory.spec is not None
    if memory.read_slots is None or memory.read_slots.generation != memory.spec.id:
        memory.read_slots = ReadSlots.of(memory.spec)
    return memory.read_slots


def _pass_over(memory: MachineMemory, worker: str, names: str) -> None:
    """Do without the slots of nodes that a member cannot reach: another copy or a commit is used instead.

    They may be sound, and stay where they are. Slots of other states there are not in question: a member that
    cannot reach those either says so then.

    Args:
        names: files with a comma between them, one of each node.
    """
    assert memory.spec is not None
    source = memory.spec.source
    read = _read_slots(memory)
    away = {node for name in names.split(",") for node, *_ in read.by_name.get(name, ())}
    if new := away - read.away:  # all members may miss the same node
        held = (slot for node in new for slot in memory.inventory.get(node, ()))
        state = source.generation, source.step
        memory.bad_slots.update(slot.identity for slot in held if (slot.generation, slot.step) == state)
        memory.bad_slots.update(each for found in read.by_name.values() for each in found if each[0] in new)
        read.away |= new
    where = ", ".join(sorted(away))
    text = f"worker {worker} cannot read {names} on node {where}: its snapshots of this step are passed over"
    blame(memory, FailureKind.PEER_LOST, worker, culprit=False, text=text, cause="unreachable")


def snapshot_sealed(memory: MachineMemory, event: m.SnapshotSealed) -> None:
    """Count a pinned snapshot, or have it released if it is void.

    That of a node which is silent, or has not joined yet, counts once it is there: its agent tells all when
    it is greeted, which may be before it joins, and not again. Where its slots are gone by then, their upload
    says so.
    """
    state, known = (event.step, event.generation), event.generation in memory.layouts
    if event.node not in memory.roster.nodes:
        if event.node not in memory.freed:
            memory.away.setdefault(event.node, {})[state] = event.slots
        return
    if not known and (memory.spec is None or event.generation >= memory.spec.id):
        return
    if not counts(memory, event.generation, event.step):
        memory.checkpoints.voided(event.node, state)
        return
    if not known:
        return
    if memory.spec is not None and event.generation == memory.spec.id:  # older ones' steps are no progress
        progress(memory, event.step)
    memory.emit(*memory.checkpoints.sealed(state, event.node, event.slots, memory.layouts[event.generation]))


def inventory(memory: MachineMemory, event: m.Inventory) -> None:
    if memory.state is MachineState.COLLECTING and memory.awaited.get(event.node) == event.request:
        del memory.awaited[event.node]
        memory.inventory[event.node] = event.slots
        memory.heard(len(memory.awaited))


def uploaded(memory: MachineMemory, event: m.Uploaded) -> None:
    state = (event.step, event.generation)
    trouble, slot = event.slot_trouble
    if trouble == "gone":  # its pin was given up for a newer checkpoint: no fault of anybody
        memory.checkpoints.slot_lost(event.node, slot, state)
        memory.alert("info", "upload", f"step {event.step} on {event.node} gave way to a newer snapshot")
        return
    damaged = trouble == "corrupt"
    if event.error:
        memory.storage_problem = event.error
        kind = "corrupt" if damaged else "storage"  # a slot's damage is no outage of storage
        text = f"upload of step {event.step} on {event.node} failed: {event.error}"
        memory.alert("warning", kind, text, node=event.node)
    if damaged:
        bad = (event.node, slot, event.generation, event.step)
        if bad not in memory.bad_slots:
            memory.bad_slots.add(bad)
            memory.emit(m.Quarantine(*bad))
        memory.checkpoints.slot_lost(event.node, slot, state)
    elif memory.checkpoints.uploaded(event, memory.now):
        memory.appends.push(memory.checkpoints.commit())
    memory.storage_answered()


def appended(memory: MachineMemory, event: m.Appended) -> None:
    if event.fenced:
        end = fenced_end(event.owner, memory.job.name)
        memory.finish(end.status, end.detail, end.keep)
        return
    if event.error:
        memory.storage_problem = event.error
        memory.alert("warning", "storage", f"log entry ({event.kind}) failed: {event.error}")
        state = (event.step, event.generation)
        if event.parts_gone and memory.checkpoints.parts_gone(state, memory.now, bool(event.unproven)):
            memory.appends.settle(event, memory.now)  # no longer on its way ...
            memory.appends.drop_commits()  # ... and made anew once all is uploaded again
            return
        if event.kind == "commit" and memory.checkpoints.outdated((event.step, event.generation)):
            memory.appends.settle(event, memory.now)  # no longer on its way ...
            memory.appends.drop_commits()  # ... and not to be tried again: a newer checkpoint takes its place
            return
        if event.kind == "commit" and memory.checkpoints.passed_over(state, event.parts_gone):
            memory.appends.give_up(event)  # nobody mends it, and a newer one may wait behind it
            return
    entry = memory.appends.settle(event, memory.now)
    memory.storage_answered()
    if not isinstance(entry, m.AppendCommit):
        return
    commit = m.Commit(event.step, event.generation, event.manifest, event.seq, event.digest)
    memory.commits.append(commit)
    forget_older(memory, commit)
    took_s = memory.checkpoints.took_s((event.step, event.generation), memory.now)
    memory.commit_s = memory.commit_s if took_s is None else took_s
    if not counts(memory, event.generation, event.step):
        return
    memory.checkpoints.committed = max(memory.checkpoints.committed, event.step)
    memory.alert("info", "commit", f"step {event.step} committed", step=event.step, manifest=event.manifest)
    if event.unproven:
        text = (
            f"step {event.step} is committed without the ledger lines of steps {event.unproven}: no node and"
            " no storage has them, so nothing proves what those steps fed, and `ledger verify` counts their"
            " samples as lost. The state is whole; to have the steps proven, train them again: launch with"
            " checkpoint.resume_step at a commit before them"
        )
        memory.alert("error", "ledger", text, step=event.step)
    memory.emit(*memory.checkpoints.settled((event.step, event.generation), list(memory.roster.nodes)))


def retired(memory: MachineMemory, event: m.Retired) -> None:
    """Forget commits that retention has given up: their objects may be deleted at any time."""
    memory.commits = [commit for commit in memory.commits if commit.manifest not in event.manifests]
    newest = newest_commit(memory.commits, memory.history or memory.spec, memory.bad_manifests)
    step = 0 if newest is None else newest.step  # the newest one goes where it is damaged
    memory.checkpoints.committed = min(memory.checkpoints.committed, step)
    memory.quiet = True


def tick(memory: MachineMemory, event: m.Tick) -> None:
    """Change nothing: all that is due at a time is found afterwards."""


HANDLERS: dict[type[Any], Callable[[MachineMemory, Any], None]] = {
    m.Begin: begin,
    m.NodeJoined: node_joined,
    m.NodeLost: node_lost,
    m.WorkerReady: worker_ready,
    m.WorkerExited: worker_exited,
    m.Stalled: stalled,
    m.Heartbeat: heartbeat,
    m.AgentRestarting: agent_restarting,
    m.Outcome: outcome,
    m.SnapshotSealed: snapshot_sealed,
    m.Inventory: inventory,
    m.Uploaded: uploaded,
    m.Appended: appended,
    m.Retired: retired,
    m.Fenced: fenced,
    m.DrainNotice: notice,
    m.UserRequest: user_request,
    m.Order: order,
    m.Planned: planned,
    m.Measured: measured,
    m.BottleneckReport: finding,
    m.RuleFinding: rule_finding,
    m.Tick: tick,
}
