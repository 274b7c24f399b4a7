"""Rest of a run that an operator has paused: its state is committed, its workers have ended."""

from __future__ import annotations

from picotron_ray.coordinator.generation_stop import kill
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Source
from picotron_ray.coordinator.states import MachineState

RESTS = "the run is paused"  # reason of its workers' ends, which are no failures
PAUSED = "paused"  # kind of the alert that tells when nobody computes any more


def commit_state(memory: MachineMemory, point: Source) -> None:
    """Make the state to go on from the checkpoint under way."""
    if point.kind == "slots":  # else it is the newest commit, or nothing was trained
        assert point.generation is not None
        state = (point.step, point.generation)
        if memory.checkpoints.pending is not None and memory.checkpoints.pending.state != state:
            memory.checkpoints.pending = None
            memory.appends.drop_commits()
        memory.checkpoints.start(state, point.slots)


def rest(memory: MachineMemory, point: Source) -> None:
    """Have the state committed, and nobody compute; the nodes keep their slots."""
    told = memory.rested_at is not None and memory.held_step == point.step
    memory.go(MachineState.PAUSED)
    memory.held_step, memory.rested_with = point.step, frozenset(memory.roster.nodes)
    memory.rested_at = memory.now if memory.rested_at is None else memory.rested_at
    if point.step > memory.checkpoints.committed:
        commit_state(memory, point)
    if not told:
        text = f"paused at step {point.step}: its workers end and free their devices"
        memory.alert("info", PAUSED, text, step=point.step)


def must_decide(memory: MachineMemory) -> bool:
    """Whether what the nodes hold is asked anew: for a stop, or a node that joined.

    A coordinator that began in a pause may have heard of an older state alone.
    """
    return memory.stop_requested or not memory.rested_with.issuperset(memory.roster.nodes)


def end_workers(memory: MachineMemory) -> None:
    """End whoever lives, or starts."""
    for worker in memory.roster.in_state("starting", "idle", "busy"):
        kill(memory, worker.name, RESTS)


def go_on(memory: MachineMemory) -> None:
    """Start workers, as many as there were before: the same layout computes the same numbers."""
    if memory.incident is not None and memory.rested_at is not None:
        memory.incident.at += memory.now - memory.rested_at  # a pause is no part of its recovery
    memory.rested_at, memory.resumed_with = None, len(memory.spec.members) if memory.spec else 0
    memory.go(MachineState.STARTING)
    memory.deadline = memory.now + memory.job.cluster.start_timeout_s
