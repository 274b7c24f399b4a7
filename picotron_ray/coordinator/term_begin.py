"""Begin of a term: what the log and the agents say is taken over, and what runs is adopted.

It changes the memory alone, as the handlers of all other events do (``event_handlers``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation_begin import take_over_changes
from picotron_ray.coordinator.checkpoint_tracker import known_layouts
from picotron_ray.coordinator.final_wait import enter, expect_kept
from picotron_ray.coordinator.generation_stop import blame, kill
from picotron_ray.coordinator.housekeeping import count_death
from picotron_ray.coordinator.lineage import ancestors
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.operator_orders import send_away_again, take_orders
from picotron_ray.coordinator.policies.memory_limit import together
from picotron_ray.coordinator.policies.pace import StepPace
from picotron_ray.coordinator.policies.restore_point import newest_commit
from picotron_ray.coordinator.policies.rewind import owed_step
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.coordinator.resume_state import follow
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind

BEFORE = "steps were committed before"
"""End of the words for a run that had finished before this launch."""


def begin(memory: MachineMemory, event: m.Begin) -> None:
    """Take over from what the log and the agents say: adopt what runs, else start."""
    if memory.state is not MachineState.NEW:
        return
    specs = [*event.generations, *([event.running] if event.running else [])]
    memory.term, memory.commits = event.term, list(event.commits)
    memory.bad_manifests = {commit.manifest for commit in event.commits if commit.damaged}
    memory.deaths = event.deaths
    memory.breaker.times.extend(memory.now - ago_s for ago_s in event.failed_s_ago)
    _follow_all(memory, specs)
    memory.layouts.update(known_layouts(specs))
    memory.logged = {spec.id for spec in event.generations}
    take_over_changes(memory, event)
    memory.struck = together(() if memory.spec is None else memory.spec.struck, event.struck)
    commit = newest_commit(memory.commits, memory.spec, memory.bad_manifests)
    memory.checkpoints.committed = 0 if commit is None else commit.step
    take_orders(memory, event)
    adopted = event.running if event.running == memory.spec and not _rests(event) else None
    _take_over(memory, event, adopted)
    if adopted is not None:
        _adopt(memory, adopted, event.step_s)
        return
    _plan_rewind(memory)
    if commit is not None and commit.step >= memory.job.steps and memory.rewind is None:
        memory.finish("finished", f"step {commit.step}: all {memory.job.steps} {BEFORE}")
        return
    memory.go(MachineState.STARTING)
    memory.deadline = memory.now + memory.job.cluster.start_timeout_s
    expect_kept(memory, event)


def _rests(event: m.Begin) -> bool:
    """Whether an operator has paused the run, and nobody is in its newest generation any more."""
    busy = {entry.generation for entry in event.busy}
    return event.standing.paused and event.running is not None and event.running.id not in busy


def _follow_all(memory: MachineMemory, specs: list[m.GenerationSpec]) -> None:
    """Follow the newest generation, and know those that may count in its place: back to one with a commit."""
    committed = {commit.generation for commit in memory.commits if not commit.damaged}
    since = max((spec.id for spec in specs if spec.id in committed), default=None)
    counting = [spec for spec in specs if since is None or spec.id >= since]
    # the log may lack them
    found = {older.id: older for spec in counting for older in ancestors(spec, since)}
    found |= {spec.id: spec for spec in counting}
    known = [found[generation] for generation in sorted(found)]
    first = max((at for at, spec in enumerate(known) if spec.id in committed), default=0)
    for spec in known[first:]:
        follow(memory, spec)
    step = memory.job.checkpoint.resume_step
    asked = {commit.generation for commit in memory.commits if commit.step == step}
    memory.writers = {spec.id: spec for spec in specs if spec.id in asked}


def _take_over(memory: MachineMemory, event: m.Begin, adopted: m.GenerationSpec | None) -> None:
    """Enter the living workers; one that is still in a generation of the past cannot be used again."""
    members = set() if adopted is None else {member.worker for member in adopted.members}
    busy = {entry.worker: entry.generation for entry in event.busy}
    traits = {each.node: each for each in event.traits}
    here = Counter(member.node for member in event.workers)
    for member in event.workers:
        if member.node not in memory.roster.nodes:
            memory.roster.join(member.node, here[member.node], memory.now, traits.get(member.node))
            release_committed(memory, member.node)
            send_away_again(memory, member.node)
        worker = RosterWorker(member.worker, member.node, "idle", memory.now)
        memory.roster.workers[worker.name] = worker
        at = busy.get(worker.name)
        if worker.name in members and at in (None, adopted.id if adopted else None):
            worker.state = "busy"
        elif at is not None:
            worker.state = "busy"
            kill(memory, worker.name, f"still in generation {at}, which is over")


def _plan_rewind(memory: MachineMemory) -> None:
    """Obey ``checkpoint.resume_step`` once, not again after each restart."""
    step, newest = memory.job.checkpoint.resume_step, memory.spec
    memory.rewind = owed_step(memory.job, () if newest is None else (newest,))
    if step is not None and memory.rewind is None:
        text = (
            f"checkpoint.resume_step={step} was obeyed before: the run goes on from its newest state; to go"
            " back there again, launch once without it"
        )
        memory.alert("info", "resume", text, step=step)


def _adopt(memory: MachineMemory, spec: m.GenerationSpec, step_s: float) -> None:
    """Carry on with a generation of the term before; it is entered in the log where it is missing."""
    memory.go(MachineState.RUNNING)
    memory.seen_step, memory.launched_at = spec.resume_step, memory.now
    memory.pace = StepPace(spec.resume_step, memory.now, adopted=True, told_s=step_s)
    memory.emit(m.RunGeneration(spec, adopt=True))
    heard = set(memory.roster.nodes)
    memory.alert(
        "info", "adopted", f"adopted generation {spec.id}: {len(spec.members)} workers, {spec.layout}"
    )
    enter(memory, spec)
    missing = [member for member in spec.members if member.worker not in memory.roster.workers]
    here = Counter(member.node for member in spec.members)
    for name, node in ((each.worker, each.node) for each in missing if each.node not in heard):
        # not heard is not lost: its call fails, or it stays silent, if it is
        memory.unheard.add(node)
        memory.roster.join(node, here[node], memory.now)
        send_away_again(memory, node)
        memory.roster.workers[name] = RosterWorker(name, node, "busy", memory.now)
    for name, node in ((each.worker, each.node) for each in missing if each.node in heard):
        text = f"worker {name} on {node} was gone when the coordinator came back"
        count_death(memory)
        blame(memory, FailureKind.WORKER_EXITED, name, culprit=True, text=text, cause="killed")
        memory.emit(m.KillWorker(name, "counts as gone"))  # its page may be all that is


def release_committed(memory: MachineMemory, node: str) -> None:
    """Undo pins of an earlier term, whose commit was never followed by its release."""
    commit = newest_commit(memory.commits, memory.spec, memory.bad_manifests)
    if commit is not None:
        release = memory.checkpoints.release(node, (commit.step, commit.generation))
        # newer ones may count only because what the node holds was not known
        memory.emit(replace(release, committed=min(release.committed, commit.step)))
