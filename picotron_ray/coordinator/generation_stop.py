"""End of a generation: in order at a step boundary, or torn out of its collectives."""

from __future__ import annotations

from typing import Literal

from picotron_ray.coordinator.final_wait import KEPT
from picotron_ray.coordinator.machine_memory import Incident, MachineMemory
from picotron_ray.coordinator.messages import Fenced, Interrupt, KillWorker, Member, Outcome, Source
from picotron_ray.coordinator.policies.precedence import goes_before
from picotron_ray.coordinator.policies.rewind import BadStep
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind

MOST_KILLS = 3  # a worker ordered to die this often without an answer counts as dead
SETTLE_FACTOR = 5.0  # x interrupt_timeout_s: from the first orderly outcome to the last one
STEPS_AT_HAND = 3.0  # x the mean step time: a boundary that was asked for comes within two steps


def leave(memory: MachineMemory, reason: str) -> None:
    """Ask all members to stop together after the step at hand."""
    memory.reason, memory.boundary_asked = reason, True
    memory.alert(
        "info",
        "boundary",
        f"stopping generation {memory.spec.id if memory.spec else '?'} at a boundary: {reason}",
    )
    memory.go(MachineState.LEAVING)
    memory.leave_by = memory.now + _boundary_s(memory)
    _interrupt(memory, "boundary")


def _boundary_s(memory: MachineMemory) -> float:
    """Longest that a generation takes to its next boundary.

    A member that is stuck on the way is found by its page, much sooner. This is for one whose steps go on,
    and for what no page shows; so it has the time of the longest phase of which no length is known.
    """
    assert memory.spec is not None
    elastic = memory.job.elastic
    phase_s = max(elastic.first_step_timeout_s, elastic.compile_timeout_s)
    return (
        STEPS_AT_HAND * memory.step_s + phase_s + memory.answer_s(len(memory.spec.members)) + memory.flush_s
    )


def blame(
    memory: MachineMemory, kind: FailureKind, target: str, *, culprit: bool, text: str, cause: str = ""
) -> None:
    """Note a failure of the running generation; the first one aborts it.

    A member that lost a peer only suffers: the peer's own end, where it is heard of later, replaces it.
    Of several the one that goes before the others is answered (``policies.precedence``).

    Args:
        target: worker or node that is concerned.
        culprit: the target caused it, rather than suffered from it.
        cause: the reporter's own word for it; empty: the kind says all.
    """
    assert memory.spec is not None
    cause = cause or kind.value
    step = memory.seen_step
    incident = memory.incident
    if incident is None or culprit:  # thousands of victims need not be told of one by one
        memory.alert("warning", "failure", text, cause=cause, target=target, step=step, culprit=culprit)
    if incident is None:
        memory.incident = Incident(kind, cause, target, step, memory.now, culprit)
    elif culprit and (not incident.culprit or goes_before(kind, cause, incident.kind, incident.cause)):
        incident.kind, incident.cause, incident.target, incident.culprit = kind, cause, target, True
    if memory.state in (MachineState.RUNNING, MachineState.LEAVING):
        memory.reason = text
        memory.go(MachineState.ABORTING)
        memory.deadline = memory.now + memory.answer_s(len(memory.spec.members)) + memory.flush_s
        _interrupt(memory, "hard")


def note_bad_step(memory: MachineMemory, event: Outcome) -> None:
    """Note what all members find alike; the first one to say so is told of."""
    told, memory.verdict = bool(memory.verdict), memory.verdict or event.detail
    if event.bad_step and (memory.bad is None or event.bad_step < memory.bad.step):
        memory.bad = BadStep(event.bad_step, event.bad_reason, event.detail)
    if not told:
        target = f"step {event.bad_step}" if event.bad_step else event.worker
        blame(memory, FailureKind.NUMERICS, target, culprit=True, text=event.detail)


def note_unsaved(memory: MachineMemory, held: int) -> None:
    """Note a generation as failed whose members all finished, and left no state of the step they finished at.

    Nobody complains of that, and all that it trained is trained again: unnoticed, that would go on for
    ever. A node that went since took its snapshots along, which explains itself.

    Args:
        held: finished steps of the newest state that is held.
    """
    members = () if memory.spec is None else memory.spec.members
    ends = [memory.outcomes.get(member.worker) for member in members]
    if memory.spec is None or memory.incident is not None or memory.distrust_slots:
        return
    if not members:  # of an earlier launch, which its nodes kept slots of, or what a run was begun from
        return
    done = min(end.step if end is not None and end.kind == "finished" else -1 for end in ends)
    if done <= held or any(member.node not in memory.roster.nodes for member in members):
        return
    target = members[0].node
    text = (
        f"generation {memory.spec.id} finished at step {done}, and nothing that is held is newer than step"
        f" {held}: its last snapshots are missing"
    )
    kind, cause = FailureKind.FAILED, "unsaved"
    memory.alert("error", "failure", text, cause=cause, target=target, step=memory.seen_step, culprit=False)
    memory.incident = Incident(kind, cause, target, memory.seen_step, memory.now, culprit=False)
    memory.reason = text


def _interrupt(memory: MachineMemory, mode: Literal["hard", "boundary"]) -> None:
    assert memory.spec is not None
    wait_s = memory.answer_s(len(memory.spec.members))
    memory.remind_at = memory.now + (wait_s / 2 if mode == "hard" else wait_s)
    workers, outcomes, generation = memory.roster.workers, memory.outcomes, memory.spec.id
    for member in memory.spec.members:  # in one pass: a loss among 16,000 is to be answered in 50 ms
        worker = workers.get(member.worker)
        if worker is not None and worker.state != "dying" and member.worker not in outcomes:
            memory.out.append(Interrupt(member.worker, generation, mode))


def step_leaving(memory: MachineMemory) -> bool:
    """Wait for all members to leave; True once they have.

    A member that lags behind after the first one left aborts the generation, and so does it if nobody leaves.
    """
    first = memory.first_unsettled()
    if first is None:
        return True
    if memory.outcomes and memory.deadline is None:
        memory.deadline = memory.now + SETTLE_FACTOR * memory.answer_s(len(memory.outcomes)) + memory.flush_s
    if memory.deadline is not None and memory.now >= memory.deadline:
        worker = first.worker
        blame(
            memory,
            FailureKind.LATE,
            worker,
            culprit=worker not in memory.rescued,
            text=f"worker {worker} did not stop with the others",
        )
    elif not memory.outcomes and memory.now >= memory.leave_by:
        text = f"generation {memory.spec.id if memory.spec else '?'} came to no boundary: nobody has left"
        blame(memory, FailureKind.LATE, first.worker, culprit=False, text=text)
    elif memory.boundary_asked and memory.now >= memory.remind_at:
        _interrupt(memory, "boundary")
    return False


def step_aborting(memory: MachineMemory) -> bool:
    """Wait for all members to settle; True once they have.

    Those that do not in time are killed, but who is rescued: its agent does that once its slots are saved.
    """
    if memory.first_unsettled() is None:
        return True
    if memory.deadline is not None and memory.now >= memory.deadline:
        for member in _late(memory):
            _find_culprit(memory, member.worker)
            kill(
                memory,
                member.worker,
                f"did not leave generation {memory.spec.id if memory.spec else '?'} in time",
            )
    elif memory.deadline is not None and memory.now >= memory.remind_at:
        _interrupt(memory, "hard")
    return False


def _late(memory: MachineMemory) -> list[Member]:
    """Members to kill when the time to settle is over; it stays over for as long as some are rescued."""
    late = memory.unsettled()
    if not any(member.worker in memory.rescued for member in late):
        memory.deadline = None
        return late
    workers = memory.roster.workers
    return [m for m in late if m.worker not in memory.rescued and workers[m.worker].state != "dying"]


def _find_culprit(memory: MachineMemory, worker: str) -> None:
    """Blame the worker that does not answer, where so far only its victims were heard."""
    incident = memory.incident
    if incident is not None and not incident.culprit:
        incident.kind, incident.target, incident.culprit = FailureKind.HANG, worker, True
        incident.cause = incident.kind.value


def kill(memory: MachineMemory, name: str, reason: str) -> None:
    """Order a worker's death.

    It counts as alive until its exit is reported, or until it was ordered too often.
    """
    worker = memory.roster.workers[name]
    worker.writing = worker.writing or worker.state == "busy"
    worker.state, worker.since = "dying", memory.now
    worker.kills += 1
    memory.doomed.add(name)
    memory.emit(KillWorker(name, reason))


def fenced(memory: MachineMemory, event: Fenced) -> None:
    """Stop at once, whatever is under way: it belongs to the coordinator of the newer term."""
    why = f"a newer coordinator has taken over ({event.why}); this one stops, {KEPT}"
    memory.finish("fenced", why, Source("slots"))


def sweep_dying(memory: MachineMemory) -> None:
    """Kill dying workers again whose exit is not reported in time; after ``MOST_KILLS`` forget them.

    The death of one that is rescued is put off until then.
    """
    for worker in memory.roster.in_state("dying"):
        early = memory.now - worker.since < memory.job.elastic.interrupt_timeout_s
        if early or worker.name in memory.rescued:
            continue
        if worker.kills < MOST_KILLS:
            kill(memory, worker.name, "still there")
        else:
            del memory.roster.workers[worker.name]
            memory.alert("error", "lost", f"worker {worker.name} on {worker.node} never confirmed its death")
