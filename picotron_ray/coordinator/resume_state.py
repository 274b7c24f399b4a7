"""Choice of the state that the next generation goes on from: the newest one, an older one, or one asked for.

A launch counts once a member had its state. One that ended before that, because its source is damaged or
gone, has changed nothing: it is taken back. The next choice is made from all that its predecessor left, and
the rewind that it was to do is still owed. The same holds for a launch by an earlier coordinator of which
nothing is left.
"""

from __future__ import annotations

from picotron_ray.coordinator.lineage import descend, on_lineage, slim
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import (
    Commit,
    GenerationId,
    GenerationSpec,
    Link,
    Rewind,
    SlotInfo,
    Source,
)
from picotron_ray.coordinator.policies.restore_point import (
    complete_states,
    newest_commit,
    older_state,
    restore_point,
)
from picotron_ray.coordinator.policies.rewind import BadStep, asked_for, decide, owed_step, samples
from picotron_ray.errors import CorruptError

MOST_CANDIDATES = 16  # without a commit in between: the oldest one and the newest


# --- the history that counts -----------------------------------------------------------------------


def follow(memory: MachineMemory, spec: GenerationSpec | None) -> None:
    """Make a generation the newest one; what follows goes by its lineage."""
    if memory.held and memory.spec is not None:
        memory.worked = memory.spec.id
    older = [slim(each) for each in memory.candidates if spec is not None and each.id < spec.id]
    if len(older) >= MOST_CANDIDATES:
        del older[1]
    memory.candidates = older if spec is None else [*older, spec]
    memory.spec = memory.history = spec
    memory.held = False


def forget_older(memory: MachineMemory, commit: Commit) -> None:
    """Take a commit's generation as the oldest one that the run may have to return to."""
    if any(each.id == commit.generation for each in memory.candidates):
        memory.candidates = [each for each in memory.candidates if each.id >= commit.generation]


def settle_history(memory: MachineMemory) -> None:
    """Find the generation whose lineage counts: the newest one that was seen at work, or left a state."""
    if memory.spec is None or memory.held:
        _turn_to(memory, memory.spec)
    else:
        _turn_to(memory, _with_a_state(memory, memory.worked))
        _owe_again(memory)


def _owe_again(memory: MachineMemory) -> None:
    """Take back with a launch that it went to ``checkpoint.resume_step``."""
    if memory.spec is None or memory.spec.obeyed_step is None or memory.rewind is not None:
        return
    if not _taken_back(memory) or memory.history is None:
        return
    memory.rewind = owed_step(memory.job, (memory.history,))
    step = memory.spec.obeyed_step
    if memory.rewind is None and memory.history.obeyed_step != step:
        text = (
            f"the run had gone back to step {step}, and nothing is left of what it did since: it goes on from"
            f" what was before; to go back again, launch with checkpoint.resume_step={step}"
        )
        memory.alert("warning", "resume", text, step=step)


def counts(memory: MachineMemory, generation: GenerationId, step: int) -> bool:
    """Whether a state may be part of the history: what a silent node holds may decide which that is."""
    return any(on_lineage(spec, generation, step) for spec in (memory.spec, memory.history))


def _taken_back(memory: MachineMemory) -> bool:
    return memory.spec is not None and memory.history is not None and memory.history.id != memory.spec.id


def _turn_to(memory: MachineMemory, spec: GenerationSpec | None) -> None:
    if spec is None or (memory.history is not None and spec.id == memory.history.id):
        return
    memory.history = spec
    commit = newest_commit(memory.commits, spec, memory.bad_manifests)
    memory.checkpoints.committed = 0 if commit is None else commit.step


def _with_a_state(memory: MachineMemory, worked: GenerationId | None = None) -> GenerationSpec:
    """Return the newest generation that left a state; ``worked`` counts though nothing of it is left."""
    committed = {each.generation for each in memory.commits if each.manifest not in memory.bad_manifests}
    slots = held_slots(memory)
    for spec in reversed(memory.candidates):
        own = [slot for slot in slots if slot.generation == spec.id]
        if spec.id in committed or next(complete_states(own, memory.layouts, spec), None) is not None:
            return spec
        if worked is not None and spec.id <= worked:
            return spec
    return memory.candidates[0]


# --- the state --------------------------------------------------------------------------------------


def held_slots(memory: MachineMemory) -> list[SlotInfo]:
    """Slots that a generation may read."""
    if not memory.bad_slots and not memory.taken_up:  # as a rule: of 30,000 slots none is looked at
        return [slot for held in memory.inventory.values() for slot in held]
    return [
        slot
        for held in memory.inventory.values()
        for slot in held
        # what was kept is restored from its commit, whose release deletes the slots at any time
        if slot.identity not in memory.bad_slots and (slot.step, slot.generation) not in memory.taken_up
    ]


def newest_state(memory: MachineMemory) -> tuple[Source, str]:
    """Choose the state to go on from, and say why.

    Raises:
        LookupError: there is no commit of ``checkpoint.resume_step``.
        CorruptError: there are commits, and no state at all can be used.
    """
    if memory.rewind is not None:
        return _state_asked_for(memory, memory.rewind)
    point, why = _newest_on_history(memory)
    if point.kind == "init" and memory.commits:
        _turn_to(memory, _with_a_state(memory))  # nothing is left of what it did
        _owe_again(memory)
        if memory.rewind is not None:
            return _state_asked_for(memory, memory.rewind)
        point, why = _newest_on_history(memory)
    if point.kind == "init" and memory.commits:  # to train anew, unasked, would throw away what was committed
        raise _nothing_left(memory)
    return point, why


def _newest_on_history(memory: MachineMemory) -> tuple[Source, str]:
    return restore_point(
        held_slots(memory),
        memory.layouts,
        memory.commits,
        memory.history,
        bad_manifests=memory.bad_manifests,
        use_slots=not memory.distrust_slots,
    )


def _nothing_left(memory: MachineMemory) -> CorruptError:
    lost = newest_commit(memory.commits, memory.history)
    if lost is not None:
        return CorruptError(
            f"all commits are damaged, the newest one is of step {lost.step}; see `picotron-ray checkpoints"
            " verify`, restore the objects that it names, or start a run of another name",
            lost.manifest,
        )
    return CorruptError(
        "nothing is left of what the run did since it went back, and it does not begin anew unasked; go on"
        f" from a commit of {_steps(memory)} by checkpoint.resume_step, or start a run of another name"
    )


def _steps(memory: MachineMemory) -> list[int]:
    return sorted({commit.step for commit in memory.commits})


def _state_asked_for(memory: MachineMemory, step: int) -> tuple[Source, str]:
    """Find the commit of ``checkpoint.resume_step``; a void one will do where the history has none."""
    there = [commit for commit in memory.commits if commit.step == step]
    if not there:
        raise LookupError(f"checkpoint.resume_step: saw {step}, allowed are the commits at {_steps(memory)}")
    good = [commit for commit in there if commit.manifest not in memory.bad_manifests]
    if not good:
        others = [at for at in _steps(memory) if at != step]
        raise CorruptError(
            f"the commit of step {step}, which checkpoint.resume_step asks for, is damaged; nothing was given"
            f" up for it: name another one of {others}, or leave it out to go on from the newest",
            there[-1].manifest,
        )
    chosen = newest_commit(good, memory.history) or max(good, key=lambda commit: commit.seq)
    point, why = restore_point((), {}, [chosen], None)
    return point, f"checkpoint.resume_step={step}; {why}"


# --- rewinds ---------------------------------------------------------------------------------------


def owed_rewind(memory: MachineMemory) -> BadStep | None:
    """Return the bad step that a launch which was taken back was to answer."""
    spec, history = memory.spec, memory.history
    if spec is None or history is None or not _taken_back(memory) or memory.rewind is not None:
        return None
    undone = [rewind for rewind in spec.rewinds if rewind not in history.rewinds]
    if not undone:
        return None
    bad = BadStep(undone[-1].bad_step, undone[-1].reason, f"step {undone[-1].bad_step} is bad")
    return bad if asked_for(memory.job, bad) else None


def rewound(memory: MachineMemory, bad: BadStep | None) -> tuple[Source, str, Rewind] | None:
    """The older state to go back to for a bad step, and why; None where the run ends (``verdict``)."""
    if bad is None or not asked_for(memory.job, bad):
        return None
    allowed, why = decide(memory.job, bad, rewinds_before(memory))
    if not allowed:
        memory.verdict = why
        return None
    point, found = older_state(
        held_slots(memory),
        memory.layouts,
        memory.commits,
        memory.history,
        wanted=bad.step - memory.job.elastic.rewind_steps,
        below=bad.step,
        bad_manifests=memory.bad_manifests,
    )
    rewind = Rewind(point.step, bad.step, bad.reason)
    passed = samples(rewind, memory.job.data.global_batch)
    return point, f"{found} ({why}; {passed} are passed over)", rewind


def rewinds_before(memory: MachineMemory) -> tuple[Rewind, ...]:
    """Rewinds of the run's history so far."""
    base = memory.history
    if memory.rewind is None:
        return () if base is None else base.rewinds
    # the user goes back: what came after, and was passed over, is void
    point, _ = _state_asked_for(memory, memory.rewind)
    base = _writer(memory, point) or base
    return tuple(r for r in (() if base is None else base.rewinds) if r.bad_step <= memory.rewind)


def _writer(memory: MachineMemory, point: Source) -> GenerationSpec | None:
    """Spec of who wrote the commit that a user asked for, which may be void."""
    return None if point.generation is None else memory.writers.get(point.generation)


def lineage_from(memory: MachineMemory, point: Source) -> tuple[Link, ...]:
    """Return the lineage of a generation that goes on from a state."""
    asked = None if memory.rewind is None else _writer(memory, point)
    return descend(asked or memory.history, point)


def obeyed_step(memory: MachineMemory) -> int | None:
    """Return ``checkpoint.resume_step`` where the next generation, or an ancestor, has gone back to it.

    A launch without it forgets that it was, so that the one after may go back again.
    """
    if memory.rewind is not None:
        return memory.rewind
    before = None if memory.history is None else memory.history.obeyed_step
    return before if before == memory.job.checkpoint.resume_step else None
