"""Orders, judged by what must be known before one is given, one coordinator at a time.

A launch awaits the answer of every node to the newest question, and the end of everybody who may still write.
A worker counts as dead when that is heard, or after several orders to die. One that is not known is told to
die. Only states that count are uploaded, by nodes that are there, and only their commits free what they hold.
Who is rescued neither counts as dead nor is left behind by a launch. Growth waits for workers on their way,
and none is started where a node is about to go. Nobody is killed for not leaving what it was never called
for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.protocols import CoordinatorProtocol
from picotron_ray.coordinator.simulator.world import SETTLED_S
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import Remedy

if TYPE_CHECKING:
    from picotron_ray.coordinator.simulator.checks import Checks

LEAST_KILLS = 3  # orders to die before a worker that does not answer counts as dead
LEAST_FAILURES = 2  # of a node's rendezvous stores before another's is used
HEARD_S = 2.0  # since its last heartbeat: a node's agent lives
MOST_ASKED = 3  # questions to a node that does not answer
COMMIT_S = 5.0  # longest wait for a commit that would save steps
START_LATE_S = 4.0  # a worker that does not start may count so long after its time
GROWTH_S = 10.0  # longest wait of a ready worker for others that are starting
ROUNDING_S = 1e-6  # of times that were added up


@dataclass
class Given:
    """Questions and orders of one coordinator, and what it heard of them."""

    asked: dict[str, tuple[int, float]] = field(default_factory=dict)  # node: newest request, and when
    times: Counter[tuple[str, int]] = field(default_factory=Counter)  # how often each was asked so
    collected_at: float = 0.0  # when the present round began
    commit: m.AppendCommit | None = None  # the newest one whose reply is awaited
    heard: set[str] = field(default_factory=set)  # nodes that answered the newest request
    lost: set[str] = field(default_factory=set)  # nodes of which that was told
    leaving: set[str] = field(default_factory=set)  # nodes that are announced to go
    starts: dict[str, float] = field(default_factory=dict)  # worker that has yet to answer: since when
    kills: dict[str, tuple[str, int]] = field(default_factory=dict)  # worker: its node, orders to die
    writers: set[str] = field(default_factory=set)  # of those, who was in a generation
    rescued: dict[str, set[str]] = field(default_factory=dict)  # node: who is, as its last heartbeat says
    stores: Counter[str] = field(default_factory=Counter)  # by node: failures of its rendezvous stores


class Orders:
    """Watcher of the orders in one simulation."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self._given: dict[int, Given] = {}

    def handled(self, shell: CoordinatorProtocol, event: m.Event, commands: Sequence[m.Command]) -> None:
        """Check what follows from one event."""
        given = self._given.setdefault(id(shell), Given())
        memory = shell.machine.memory
        if any(state is MachineState.COLLECTING for _, state in memory.transitions):
            given.asked.clear()
            given.heard.clear()
            given.collected_at = memory.now
        if isinstance(event, m.Inventory):
            if given.asked.get(event.node, (0, 0.0))[0] == event.request:
                given.heard.add(event.node)
        elif isinstance(event, m.NodeLost):
            given.lost.add(event.node)
            given.leaving.discard(event.node)
        elif isinstance(event, m.DrainNotice) and event.node in memory.roster.nodes:
            given.leaving.add(event.node)
        elif isinstance(event, m.WorkerExited):
            given.starts.pop(event.worker, None)
            given.kills.pop(event.worker, None)
            given.writers.discard(event.worker)
        elif isinstance(event, m.Appended) and event.kind == "commit":
            given.commit = None
        elif isinstance(event, m.WorkerReady):
            given.starts.pop(event.worker, None)
            self._strangers(shell, (event.worker,), commands)
        elif (
            isinstance(event, m.Heartbeat)
            and event.node in memory.roster.nodes
            and event.node not in memory.unheard  # what lives there is judged when it joins
        ):
            self._strangers(shell, (*event.steps, *event.others), commands)
        if isinstance(event, m.Heartbeat):
            given.rescued[event.node] = set(event.rescued)
        if given.kills:
            self._counted_as_dead(shell, given)
        for command in commands:
            self._given_now(shell, given, command)
        if isinstance(event, m.Tick):
            self._awaited_starts(shell, given)
        if any(state is MachineState.ABORTING for _, state in memory.transitions):
            self._interrupted(shell, commands)

    def _given_now(self, shell: CoordinatorProtocol, given: Given, command: m.Command) -> None:
        memory = shell.machine.memory
        if isinstance(command, m.CollectInventory):
            given.asked[command.node] = command.request, memory.now
            given.heard.discard(command.node)
            given.times[command.node, command.request] += 1
            if given.times[command.node, command.request] > MOST_ASKED:
                self._say(f"{command.node} is asked for ever what it holds")
        elif isinstance(command, m.KillWorker) and command.worker in memory.roster.workers:
            worker = self.checks.sim.worker(command.worker)
            self._never_called(shell, command)
            given.kills[command.worker] = (
                memory.roster.workers[command.worker].node,
                given.kills.get(command.worker, ("", 0))[1] + 1,
            )
            if worker is not None and worker.generation is not None:
                given.writers.add(command.worker)
        elif isinstance(command, m.RunGeneration) and not command.adopt:
            self._launch(shell, given, command.spec)
        elif isinstance(command, m.StartWorker):
            given.starts[command.worker] = memory.now
            if command.node in given.leaving:
                self._say(f"{command.worker} is started on {command.node}, which is about to go")
        elif isinstance(command, m.AppendCommit):
            given.commit = command
        elif isinstance(command, m.Upload):
            self._upload(shell, given, command)
        elif isinstance(command, m.Release):
            counts = [
                c.step for c in shell.commits if self.checks.histories.counts(shell, c.generation, c.step)
            ]
            if command.committed > max(counts, default=0):
                self._say(f"step {command.committed} is told to be committed, and no commit of it counts")
        elif isinstance(command, m.Alert) and "grow from" in command.text and command.kind == "boundary":
            self._growth(shell)

    def _launch(self, shell: CoordinatorProtocol, given: Given, spec: m.GenerationSpec) -> None:
        memory = shell.machine.memory
        patience_s = memory.job.elastic.interrupt_timeout_s
        for node in memory.roster.nodes:
            if node not in given.asked:
                self._say(f"{spec.id} is launched, and {node} was not asked what it holds")
            elif node not in given.heard and memory.now - given.asked[node][1] < patience_s - ROUNDING_S:
                self._say(f"{spec.id} is launched before {node} has answered")
        waits = memory.now - given.collected_at < COMMIT_S and memory.remedy in (Remedy.RETRY, Remedy.EXCLUDE)
        late = given.commit
        if late is not None and waits and not spec.rewinds and late.step > spec.resume_step:
            self._overtaken(shell, spec, late)
        for worker in given.writers:
            if worker in memory.roster.workers:
                self._say(f"{spec.id} is launched while {worker} dies, which may still write")
        for node in memory.roster.nodes:
            if saved := given.rescued.get(node, set()) & memory.roster.workers.keys():
                self._say(f"{spec.id} is launched while slots of {', '.join(sorted(saved))} are saved")

    def _awaited_starts(self, shell: CoordinatorProtocol, given: Given) -> None:
        memory = shell.machine.memory
        limit_s = self.checks.sim.job.cluster.start_timeout_s + START_LATE_S
        for name, since in list(given.starts.items()):
            worker = memory.roster.workers.get(name)
            if worker is None or worker.state != "starting":
                del given.starts[name]
            elif memory.now - since > limit_s:
                self._say(f"{name} is awaited for ever")

    def _interrupted(self, shell: CoordinatorProtocol, commands: Sequence[m.Command]) -> None:
        """Check that a generation that is given up is torn apart at once: kills would cost its workers."""
        memory = shell.machine.memory
        told = {each.worker for each in commands if isinstance(each, m.Interrupt) and each.mode == "hard"}
        for member in memory.unsettled() if memory.state is MachineState.ABORTING else ():
            if member.worker not in told and memory.roster.workers[member.worker].state != "dying":
                self._say(f"{member.worker} is not told that its generation is given up")

    def _never_called(self, shell: CoordinatorProtocol, command: m.KillWorker) -> None:
        """Check that nobody is killed for staying in a generation that it was never called for.

        Unless the call, or the answer to it, may have been lost on the way.
        """
        sim, memory = self.checks.sim, shell.machine.memory
        worker = sim.worker(command.worker)
        if memory.state is not MachineState.ABORTING or memory.spec is None or worker is None:
            return
        if worker.hung or not worker.paged:  # whose page is gone is ended for that
            return
        lost_until = max(shell.paused_until, shell.born_at, sim.noise_until, *worker.node.unheard_until())
        uncalled = worker.last is None or worker.last < memory.spec.id
        if uncalled and sim.now > lost_until + SETTLED_S:
            self._say(f"{worker.name} is killed over {memory.spec.id}, which it was never called for")

    def _overtaken(self, shell: CoordinatorProtocol, spec: m.GenerationSpec, late: m.AppendCommit) -> None:
        if self.checks.counts(shell.newest, late.generation, late.step):
            self._say(f"{spec.id} is launched before the commit of step {late.step} is through")

    def _strangers(
        self, shell: CoordinatorProtocol, names: Iterable[str], commands: Sequence[m.Command]
    ) -> None:
        known = shell.machine.memory.roster.workers
        told = {command.worker for command in commands if isinstance(command, m.KillWorker)}
        freed = {command.node for command in commands if isinstance(command, m.FreeNode)}  # ends all there
        for name in names:
            worker = self.checks.sim.worker(name)
            if name not in known and name not in told and not (worker and worker.node.name in freed):
                self._say(f"{name} lives, is not known, and is not told to die")

    def _counted_as_dead(self, shell: CoordinatorProtocol, given: Given) -> None:
        roster = shell.machine.memory.roster
        for worker, (node, orders) in list(given.kills.items()):
            if worker in roster.workers:
                continue
            if node in roster.nodes and orders < LEAST_KILLS:
                self._say(f"{worker} counts as dead after {orders} orders to die")
            if node in roster.nodes and worker in given.rescued.get(node, ()):
                self._say(f"{worker} counts as dead while its slots are saved")
            del given.kills[worker]
            given.writers.discard(worker)

    def _upload(self, shell: CoordinatorProtocol, given: Given, command: m.Upload) -> None:
        memory = shell.machine.memory
        gone = command.node in given.lost or command.node in memory.roster.silent
        if gone and command.node not in memory.roster.nodes:
            self._say(f"{command.node} is asked for an upload, and counts as lost")
        if not self.checks.histories.counts(shell, command.generation, command.step):
            self._say(f"step {command.step} of {command.generation} is uploaded, and is void")

    def store_failed(self, shell: CoordinatorProtocol, home: str, times: int | None) -> None:
        stores = self._given.setdefault(id(shell), Given()).stores
        if times is None:
            stores[home] += 1
        else:
            stores[home] = max(stores[home], times) if times else 0

    def store_asked(self, shell: CoordinatorProtocol, home: str, spec: m.GenerationSpec) -> None:
        """Check that a node whose stores failed twice is not relied on where another member's did not."""
        stores = self._given.setdefault(id(shell), Given()).stores
        better = {member.node for member in spec.members if stores[member.node] < LEAST_FAILURES}
        nodes, now = shell.machine.memory.roster.nodes, self.checks.sim.now
        heard = {name for name in dict.fromkeys(member.node for member in spec.members) if name in nodes}
        heard = {name for name in heard if now - nodes[name].last_seen <= HEARD_S}
        if heard and home not in heard:
            self._say(f"{home} is silent, and is asked for the store of {spec.id}: not {heard}")
        better &= heard or better
        if stores[home] >= LEAST_FAILURES and better:
            self._say(
                f"{spec.id} relies on the store of {home}, which failed {stores[home]} times: not {better}"
            )

    def _growth(self, shell: CoordinatorProtocol) -> None:
        memory = shell.machine.memory
        ready = [worker.since for worker in memory.roster.in_state("idle")]
        if memory.roster.in_state("starting") and memory.now - min(ready, default=0.0) < GROWTH_S:
            self._say(f"{memory.spec.id if memory.spec else '?'} grows, and more workers are on their way")

    def _say(self, text: str) -> None:
        self.checks.sim.violation(text)
