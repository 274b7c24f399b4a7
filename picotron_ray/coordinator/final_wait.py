"""Wait for storage when nothing else is left to do, and state that an earlier launch kept because of it.

Training outlives any outage of storage. A run whose last state cannot be committed goes on trying for
``storage.final_wait_s`` and says how long it still will. Then it ends with "storage" and keeps the slots.
The next launch's agents report them when they join (``NodeJoined.kept``); that state is committed before
anything is trained, so its slots need no room beside those of the new workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from picotron_ray.coordinator.checkpoint_tracker import StateKey, known_layouts
from picotron_ray.coordinator.lineage import ancestors
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import (
    AppendGeneration,
    Begin,
    Finish,
    GenerationSpec,
    KeepSlots,
    NodeJoined,
    SlotInfo,
    Source,
)
from picotron_ray.coordinator.resume_state import counts, follow
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import REMOVED

KEPT = "its snapshots are kept"
MOST_NAMED = 4
TELL_S = 60.0  # the wait is told this often


def out_of_patience(memory: MachineMemory, state: StateKey) -> bool:
    """Whether storage has failed for too long to commit ``state``; the run then ends, and keeps its slots.

    The time counts from the first failure, or from an answer of the log that was owed for too long, and anew
    after a success and with every part that arrives. So a large upload may take as long as it goes on.
    """
    done = 0 if memory.checkpoints.pending is None else len(memory.checkpoints.pending.done)
    if not memory.storage_fails or done > memory.done_before:
        memory.failing_until = None
    memory.done_before = done
    if not memory.storage_fails:
        return False
    if memory.failing_until is None:
        memory.failing_until = memory.now + memory.job.storage.final_wait_s
        memory.told_wait_at = memory.now
    left_s = memory.failing_until - memory.now
    step, generation = state
    why = memory.storage_problem or "no answer"
    works = "that is restored, without which they cannot be committed" if REMOVED in why else "storage works"
    if left_s <= 0:
        memory.finish(
            "storage",
            f"step {step} is not committed: storage kept failing for {memory.job.storage.final_wait_s:g} s"
            f" ({why}); {KEPT}, launch run {memory.job.name} again once {works}"
            + (f"; it was to be the end: {memory.verdict}" if memory.verdict else ""),
            Source("slots", step, generation),
        )
        return True
    if memory.now >= memory.told_wait_at:
        memory.told_wait_at = memory.now + TELL_S
        _tell(memory, state, why, left_s)
    return False


def unkept(end: Finish, problems: Mapping[str, str]) -> Finish:
    """Have an end say which nodes did not mark what they were to keep.

    Args:
        problems: reasons by node; none: all did.
    """
    if not problems:
        return end
    named = [f"node {node[:8]}: {why}" for node, why in sorted(problems.items())[:MOST_NAMED]]
    more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
    said = f"its snapshots are not all marked as kept ({'; '.join(named)}{more})"
    detail = end.detail.replace(KEPT, said) if KEPT in end.detail else f"{end.detail}; {said}"
    return replace(end, detail=detail)


def _tell(memory: MachineMemory, state: StateKey, why: str, left_s: float) -> None:
    """Say how long the run still waits, and have the slots marked, whatever kills it meanwhile."""
    step, generation = state
    pending = memory.checkpoints.pending
    for node in sorted(() if pending is None else pending.parts):
        memory.emit(KeepSlots(node, generation, step))
    memory.alert(
        "warning",
        "storage-wait",
        f"step {step} is not committed yet ({why}); trying for another {left_s:.0f} s, then the run ends with"
        " its snapshots kept",
        step=step,
        left_s=left_s,
    )


def take_up(memory: MachineMemory, kept: tuple[SlotInfo, ...], spec: GenerationSpec | None) -> None:
    """Have the state committed that nodes kept from an earlier launch, where it is still to be committed.

    Args:
        spec: newest generation that they knew of.
    """
    if not kept:
        return
    if memory.state is MachineState.STARTING and spec is not None:
        if memory.spec is None or spec.id > memory.spec.id:
            follow(memory, spec)
            memory.checkpoints.rewound(spec)
            if memory.checkpoints.pending is None:
                memory.appends.drop_commits()
        memory.layouts = {**known_layouts([spec]), **memory.layouts}
        enter(memory, spec)
    parts: dict[tuple[StateKey, str], tuple[SlotInfo, ...]] = {}
    for slot in kept:
        key = (slot.step, slot.generation), slot.node
        parts[key] = (*parts.get(key, ()), slot)
    for (state, node), slots in sorted(parts.items(), key=lambda part: part[0]):
        _take_up_state(memory, node, state, slots)


def expect_kept(memory: MachineMemory, event: Begin) -> None:
    """Take up what the agents keep that live already, and wait for nodes whose agents do not."""
    memory.keeping = dict(event.keeping)
    take_up(memory, event.kept, event.kept_by)


def refuse(memory: MachineMemory, event: NodeJoined) -> None:
    """Leave out a node that may not take part; end the run before it trains where that node keeps its state.

    To go on from an older one would void what the node keeps. Only a person may say so.
    """
    if memory.refused.get(event.node) != event.refused:
        memory.refused[event.node] = event.refused
        memory.alert("warning", "refused", f"node {event.node} may not take part: {event.refused}")
    if memory.state is not MachineState.STARTING:
        return
    spec = event.kept_by
    newer = spec is not None and (memory.spec is None or spec.id > memory.spec.id)
    steps = [s.step for s in event.kept if newer or counts(memory, s.generation, s.step)]
    step = max(steps, default=0)
    if step > memory.checkpoints.committed:
        memory.finish(
            "failed",
            f"node {event.node} keeps step {step}, which is not committed, and may not take part:"
            f" {event.refused}; mend that, or delete it with `picotron-ray stop {memory.job.name} --discard`",
            Source("slots"),
        )


def enter(memory: MachineMemory, spec: GenerationSpec) -> None:
    """Have the log entries written that storage did not take when a generation and its ancestors ran."""
    for each in (*ancestors(spec), spec):
        if each.id not in memory.logged:
            memory.logged.add(each.id)
            memory.appends.push(AppendGeneration(each))


def _take_up_state(memory: MachineMemory, node: str, state: StateKey, slots: tuple[SlotInfo, ...]) -> None:
    step, generation = state
    if memory.state is MachineState.STARTING:
        memory.taken_up.add(state)
    if step <= memory.checkpoints.committed and counts(memory, generation, step):
        return  # committed by now: the release that follows frees it
    usable = generation in memory.layouts and counts(memory, generation, step)
    if usable and memory.state is not MachineState.STARTING:
        return  # a restarted coordinator's own: the next inventory has it
    if not usable:
        memory.alert(
            "warning",
            "kept",
            f"step {step} of generation {generation}, kept on node {node}, is not used: the run went on from"
            " another state",
        )
        return
    memory.kept = state if memory.kept is None else max(memory.kept, state)
    memory.alert("info", "kept", f"node {node} kept step {step} from an earlier launch: committing it first")
    memory.emit(*memory.checkpoints.sealed(state, node, slots, memory.layouts[generation]))


def _awaits_keeper(memory: MachineMemory, timed_out: bool) -> bool:
    """Whether a node that keeps a newer state than what is committed has yet to join."""
    committed, heard = memory.checkpoints.committed, {*memory.roster.nodes, *memory.refused}
    late = [node for node, step in memory.keeping.items() if step > committed and node not in heard]
    if late and timed_out:
        memory.finish(
            "failed",
            f"node {late[0]} keeps step {memory.keeping[late[0]]}, which is not committed, and did not join"
            f" in {memory.job.cluster.start_timeout_s:g} s; launch again once it can, or delete it with"
            f" `picotron-ray stop {memory.job.name} --discard`",
            Source("slots"),
        )
    return bool(late)


def step_kept(memory: MachineMemory, timed_out: bool) -> bool:
    """Wait for the commit of what was kept; True while that is waited for, or where the run has ended."""
    if _awaits_keeper(memory, timed_out):
        return True
    if memory.kept is None:
        return False
    step, _ = memory.kept
    pending = memory.checkpoints.pending
    if memory.checkpoints.committed >= step:
        memory.kept, memory.failing_until = None, None
        return False
    if pending is not None:
        out_of_patience(memory, pending.state)
        return True
    if timed_out:
        memory.alert("error", "kept", f"step {step} was kept, but not all of it is there to be committed")
        for state in memory.taken_up:
            memory.checkpoints.forget(state)  # slots as any others: what an inventory finds of them counts
        memory.taken_up.clear()
        memory.kept = None
    return not timed_out
