"""Faults of a simulated run: drawn by seed, about half of them during a recovery."""

from __future__ import annotations

from collections.abc import Callable

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.plan_book import FAILED_RETRY_S
from picotron_ray.coordinator.simulator.breakdowns import BREAKDOWNS
from picotron_ray.coordinator.simulator.nodes import SimNode, SimWorker
from picotron_ray.coordinator.simulator.shell import Shell, start_shell
from picotron_ray.coordinator.simulator.world import RESTART_S, Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind

Fault = Callable[[Sim], None]


def _workers(sim: Sim) -> list[SimWorker]:
    return [w for node in sim.nodes.values() for w in node.workers.values() if w.ready]


def kill(sim: Sim) -> None:
    """A worker's process dies."""
    if workers := _workers(sim):
        worker = sim.rng.pick(workers)
        worker.node.worker_dies(worker, "killed")


def hang(sim: Sim) -> None:
    """A worker stops for good, but its process lives."""
    if workers := [w for w in _workers(sim) if w.generation is not None]:
        worker = sim.rng.pick(workers)
        worker.hung = True
        if worker.generation is not None:
            sim.after(1.5, worker.generation.stalled)


def error(sim: Sim) -> None:
    """A worker's step raises."""
    if workers := [w for w in _workers(sim) if w.generation is not None and not w.hung]:
        worker = sim.rng.pick(workers)
        if worker.generation is not None:
            worker.leave(worker.generation, FailureKind.FAILED, sim.rng.pick(("nan", "oom", "error: boom")))


def page_lost(sim: Sim) -> None:
    """Pages of a node's workers are gone, or unreadable for a moment: what becomes of them is not seen.

    In some runs one of them hangs besides. Whom no coordinator ends, as a new one cannot know of it, a person
    does.
    """
    homes = [node for node in sim.nodes.values() if any(w.generation for w in node.workers.values())]
    if not homes:
        return
    workers = [w for w in sim.rng.pick(homes).workers.values() if w.generation is not None and not w.hung]
    lost = workers if sim.rng.chance(0.5) else workers[:1]
    for worker in lost:
        worker.paged = False
    if lost and sim.rng.chance(0.3):
        sim.after(sim.rng.uniform(0.2, UNREAD_S), _read_again, sim, lost)
    elif lost:
        sim.checks.unpaged(lost)
        for worker in lost:
            sim.after(UNKNOWN_S, worker.node.worker_dies, worker, "killed")
        if sim.rng.chance(0.5) and lost[0].generation is not None:
            lost[0].hung = True
            sim.after(1.5, lost[0].generation.stalled)


def _read_again(sim: Sim, workers: list[SimWorker]) -> None:
    for worker in workers:
        worker.paged, worker.read_again_at = True, sim.now


def node(sim: Sim) -> None:
    """A node dies; another one joins later on."""
    if sim.nodes:
        gone = sim.rng.pick(list(sim.nodes.values()))
        sim.remove_node(gone, told=sim.rng.chance(0.6))
        sim.after(sim.rng.uniform(2.0, 15.0), sim.add_node, gone.capacity)


def store(sim: Sim) -> None:
    """The rendezvous stores of a node do not answer, do not start, or freeze when they are used."""
    if sim.nodes:
        home = sim.rng.pick(list(sim.nodes.values()))
        home.store_fault = sim.rng.pick(("mute", "broken", "frozen"))
        home.store_bad_until = sim.now + sim.rng.uniform(5.0, 70.0)
        sim.quiet_at = max(sim.quiet_at, home.store_bad_until)
        if sim.rng.chance(0.7):
            kill(sim)


def cut(sim: Sim) -> None:
    """The network between a node and the coordinator is down for a while."""
    if sim.nodes:
        sim.rng.pick(list(sim.nodes.values())).cut_until = sim.now + sim.rng.uniform(1.0, 12.0)


def drain(sim: Sim) -> None:
    """A node is announced to go, and goes."""
    if sim.nodes:
        gone = sim.rng.pick(list(sim.nodes.values()))
        seconds = sim.rng.uniform(2.0, 10.0)
        gone.leaves_at = sim.now + seconds
        gone.report(m.DrainNotice(gone.name, gone.leaves_at), reliable=True)
        sim.after(seconds, _drained, sim, gone, sim.now)


def _drained(sim: Sim, gone: SimNode, noticed_at: float) -> None:
    if sim.nodes.get(gone.name) is gone:
        sim.checks.left(gone, noticed_at)
    if sim.nodes.get(gone.name) is gone:
        sim.remove_node(gone, told=True)
    sim.after(sim.rng.uniform(1.0, 10.0), sim.add_node, gone.capacity)


def restart(sim: Sim) -> None:
    """The coordinator dies and comes back."""
    if sim.shell is not None:
        sim.shell.die()
        sim.shell = None
        sim.after(RESTART_S, coordinator, sim)


def coordinator(sim: Sim) -> None:
    """Start a new coordinator process."""
    if sim.shell is None and not sim.over:
        start_shell(sim)


def pause(sim: Sim) -> None:
    """The coordinator is stopped for a while (SIGSTOP, a long pause of its machine)."""
    if sim.shell is not None:
        sim.shell.pause(sim.rng.uniform(1.0, 15.0))


def rival(sim: Sim) -> None:
    """The coordinator is stopped, taken for dead and replaced; then it wakes up and acts."""
    old = sim.shell
    if old is None or old.machine.memory.term == 0:
        return
    sim.shell = None
    seconds = sim.rng.uniform(2.5, 8.0)
    old.pause(seconds)
    sim.after(1.0, coordinator, sim)
    sim.after(seconds + 0.5, _provoke, sim, old)


def undead(sim: Sim) -> None:
    """The coordinator is stopped while it ends the run, and replaced; then it wakes up and goes on."""
    old = sim.shell
    if old is None or old.machine.memory.term == 0:
        return
    sim.shell, old.ending = None, True
    seconds = sim.rng.uniform(2.5, 8.0)
    old.pause(seconds)
    sim.after(1.0, coordinator, sim)
    sim.after(seconds + 0.5, _go_on, sim, old)


def _go_on(sim: Sim, old: Shell) -> None:
    """End the run, where there is a newer coordinator; else nobody is harmed."""
    if sim.storage.term > old.term:
        old.end()


def _provoke(sim: Sim, old: Shell) -> None:
    """The stopped one hears that a member died: it wants to start a generation of its own."""
    spec = old.newest
    if spec is not None:
        old.deliver(m.WorkerExited(spec.members[0].worker, "killed"))


def planner(sim: Sim) -> None:
    """The planner's process dies or hangs for a while, or gives up on some of what it is asked."""
    if sim.shell is not None:
        sim.shell.planner.silent_until = sim.now + sim.rng.uniform(1.0, 15.0)
        sim.shell.planner.fails = sim.rng.chance(0.5)
        if sim.shell.planner.fails:  # what it gave up on is asked again later: until then less may do
            sim.quiet_at = max(sim.quiet_at, sim.shell.planner.silent_until + FAILED_RETRY_S + LONGEST_S)


def outage(sim: Sim) -> None:
    """Storage refuses everything for a while."""
    sim.storage.down_until = sim.now + sim.rng.uniform(1.0, 12.0)


def lag(sim: Sim) -> None:
    """Storage answers late."""
    sim.storage.slow_until = sim.now + sim.rng.uniform(3.0, 15.0)


def mute(sim: Sim) -> None:
    """Storage does what it is told, and the replies are lost."""
    sim.storage.mute_until = sim.now + sim.rng.uniform(3.0, 10.0)


def noise(sim: Sim) -> None:
    """Messages are lost, doubled, late and out of order."""
    sim.noise_until = sim.now + sim.rng.uniform(3.0, 12.0)


def corrupt(sim: Sim) -> None:
    """A worker dies, and bits flip in the newest slots, which are about to be read."""
    kill(sim)
    sim.after(sim.rng.uniform(0.0, 0.3), _flip, sim)


def _flip(sim: Sim) -> None:
    held = [slot for node in sim.nodes.values() for slot in node.slots.values()]
    newest = max(((slot.info.step, slot.info.generation) for slot in held), default=None)
    latest = [slot for slot in held if (slot.info.step, slot.info.generation) == newest]
    for _ in range(min(2, len(latest))):
        sim.rng.pick(latest).corrupt = True


def rot(sim: Sim) -> None:
    """The newest commit is damaged in storage, or its manifest is missing there.

    Now and then that is found soon: all nodes go at once, with all that they held.
    """
    commits = sim.storage.commits()
    if len(commits) > 1 and sim.rng.chance(0.5):
        sim.bad_manifests.add(commits[-1].manifest)
        sim.storage.damage(commits[-1].manifest, missing=sim.rng.chance(0.5))
        for gone in list(sim.nodes.values()) if sim.rng.chance(0.3) else ():
            sim.remove_node(gone, told=sim.rng.chance(0.5))
            sim.after(sim.rng.uniform(2.0, 15.0), sim.add_node, gone.capacity)


def request(sim: Sim) -> None:
    """The user asks for a checkpoint."""
    sim.tell(m.UserRequest("checkpoint"))


def stop(sim: Sim) -> None:
    """The user stops the run, and asks again until a coordinator obeys."""
    sim.stop_asked = True
    sim.tell(m.UserRequest("stop"))
    if not sim.over:
        sim.after(5.0, stop, sim)


STORAGE_FAULTS = (outage, lag, mute, rot)
NETWORK_FAULTS = (cut, noise)
COORDINATOR_FAULTS = (restart, pause, rival, undead, planner)
WORKER_FAULTS = (kill, hang, error, corrupt, page_lost)
NODE_FAULTS = (node, drain, store)
FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *WORKER_FAULTS,
        *NODE_FAULTS,
        *COORDINATOR_FAULTS,
        *NETWORK_FAULTS,
        *STORAGE_FAULTS,
        *BREAKDOWNS,
        request,
        stop,
    )
}
UNREAD_S = 3.0  # longest that an agent cannot read pages that are there
UNKNOWN_S = 20.0  # by then a worker without a page was ended by a person
LONGEST_S = 30.0  # nothing that a fault sets off by itself comes later than this after it


RARE_STATES = (
    MachineState.FINALISING,
    MachineState.COLLECTING,
    MachineState.LEAVING,
    MachineState.WAITING,
    MachineState.ABORTING,
)


def ambush(sim: Sim) -> list[tuple[MachineState, float, str]]:
    """Draw faults that lie in wait for a state that is soon over: (state, seconds after it began, fault)."""
    names = [name for name in FAULTS if name != "stop"]
    return [
        (sim.rng.pick(RARE_STATES), sim.rng.uniform(0.0, 1.5) * sim.rng.random(), sim.rng.pick(names))
        for _ in range(sim.rng.below(4))
    ]


def plan(sim: Sim, count: int) -> list[tuple[float, str]]:
    """Draw ``count`` faults: each at a time of its own, or shortly after the one before.

    Some runs are stopped in the end.
    """
    names, times = [name for name in FAULTS if name != "stop"], 0.5
    drawn: list[tuple[float, str]] = []
    for _ in range(count):
        times += sim.rng.uniform(0.01, 1.5) if drawn and sim.rng.chance(0.5) else sim.rng.uniform(1.0, 20.0)
        drawn.append((times, sim.rng.pick(names)))
    if sim.rng.chance(0.15):
        late = 210.0 / (len(sim.nodes) + 1)  # by then this many events were handled
        drawn.append((max(times, late) + sim.rng.uniform(0.01, 5.0), "stop"))
    return drawn
