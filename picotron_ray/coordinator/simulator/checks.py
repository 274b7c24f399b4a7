"""Invariants, judged from what the simulation knows, not from what the machine believes.

1. One writer: terms never go back in the log; a commit follows its generation and covers the whole state;
   a fenced coordinator orders nothing any more; no node obeys an older term, nor is a summary written by one.
2. A launch resumes from the newest complete state that its coordinator could know of, on the lineage,
   and from nothing else; generations and worker names are used once; no worker is in two generations.
3. The ledger is exact: the history of every state that is restored or committed holds each step once.
4. Progress: the run ends as "finished" (or "stopped", where that was asked for, or "failed", where a step is
   bad whoever computes it) in bounded time after the last fault, with everything committed that could be
   saved and nobody left at work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.histories import Chain, Histories, goes_back, valid
from picotron_ray.coordinator.simulator.orders import Orders
from picotron_ray.coordinator.simulator.promptness import Promptness
from picotron_ray.coordinator.simulator.protocols import (
    CoordinatorProtocol,
    GenerationProtocol,
    NodeProtocol,
    WorkerProtocol,
)
from picotron_ray.coordinator.simulator.slots import SimSlot, StepHistory, complete
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind, Remedy

STRANGERS_S = 5.0  # workers of an earlier coordinator may write unseen until they are dead
BEGUN_S = 1.5  # by then the heartbeat of who begins a generation is heard
CALM_S = 20.0  # after the last fault's own consequences: time to start workers and grow
LONGEST_REPLY_S = 0.2  # of storage that is not disturbed
ASKED_AGAIN_S = 80.0  # a reply that was lost is asked for again after this long at most


class Checks:
    """Watcher of one simulation; everything found is reported to ``sim.violation``."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.sim: Sim
        self.specs: dict[m.GenerationId, m.GenerationSpec] = {}  # all that were launched
        self.slots: dict[m.SlotIdentity, SimSlot] = {}  # all that were ever sealed
        self.started: set[str] = set()
        self.terms: dict[str, int] = {}  # by node: newest term that it was given an order of
        self.doomed = False  # every generation fails: the run must be given up
        self.excused = ""  # status that a run may end with besides
        self.blackout = False  # storage is down for good: a run may end with "storage", and keeps its slots
        self.stranger_at = (
            -STRANGERS_S
        )  # when a worker was last told to die that its coordinator does not know
        self.launched_at = 0.0  # when the newest generation was
        self.stepped_at = 0.0  # when the last step was finished
        self.entered: Callable[[MachineState], None] = lambda state: None  # told of every state that begins

    @cached_property
    def promptness(self) -> Promptness:
        """Watcher of delays."""
        return Promptness(self.sim)

    @cached_property
    def histories(self) -> Histories:
        """Watcher of what counts."""
        return Histories(self)

    @cached_property
    def orders(self) -> Orders:
        """Watcher of what must be known before an order."""
        return Orders(self)

    # --- what the machine did ------------------------------------------------------------------------

    def handled(self, shell: CoordinatorProtocol, event: m.Event, commands: Sequence[m.Command]) -> None:
        """Check after each event of each coordinator."""
        self.histories.handled(shell, event)
        for pair in shell.machine.memory.transitions:
            self.coverage.note(pair)
            self.entered(pair[1])
            if pair[1] is MachineState.ABORTING:
                self._abort_has_a_reason(shell)
            if pair[1] is MachineState.COLLECTING:
                shell.heard.clear()
        stopping = shell.machine.memory.stop_requested
        if shell.stopping and not stopping:  # nobody need ask for it again
            self.sim.violation("a stop that it knew of is forgotten")
        shell.stopping = stopping
        if shell.fenced and commands:
            self.sim.violation(f"{len(commands)} commands after it was fenced")
        if isinstance(event, m.Fenced) or (isinstance(event, m.Appended) and event.fenced):
            shell.fenced = True
        if not shell.fenced:
            self.orders.handled(shell, event, commands)
        if isinstance(event, m.Tick):
            self.promptness.ticked(shell)
        elif isinstance(event, m.Appended) and event.kind == "commit" and event.seq:
            self.promptness.committed(shell, event)
        elif isinstance(event, m.SnapshotSealed):
            self.promptness.sealed(shell, event)
        if shell.finished is not None and commands:
            self.sim.violation(f"{len(commands)} commands after the end ({shell.finished.status})")
        for command in commands:
            if isinstance(command, m.StartWorker):
                if command.worker in self.started:
                    self.sim.violation(f"worker name {command.worker} was used twice")
                self.started.add(command.worker)
            elif isinstance(command, m.Upload):
                self.promptness.uploading(shell, command)
            elif isinstance(command, m.Quarantine):
                assert command.generation is not None
                shell.quarantined.add((command.node, command.slot, command.generation, command.step))
            elif (
                isinstance(command, m.KillWorker)
                and command.worker not in shell.machine.memory.roster.workers
            ):
                self.stranger_at = self.sim.now
            elif isinstance(command, m.Finish):
                self._finished(shell, command)

    def _finished(self, shell: CoordinatorProtocol, command: m.Finish) -> None:
        """Check an end: the present coordinator may end only a finished run; a replaced one is fenced."""
        may_end = self.excused == command.status or (self.blackout and command.status == "storage")
        if self.sim.shell is not shell or may_end:
            return
        if self.doomed:
            if command.status != "failed":
                self.sim.violation(f"the run ended as {command.status}, and nobody could train")
            return
        allowed = {
            "finished",
            "stopped" if self.sim.stop_asked else "",
            "failed" if self.sim.bad_step and self.sim.job.elastic.on_nonfinite != "rewind" else "",
        }
        if command.status not in allowed:
            self.sim.violation(f"the run ended as {command.status}: {command.detail}")
            return
        chain = self.histories.chains(shell, shell.newest)[-1]
        commits = [c for c in self.sim.storage.commits() if valid(chain, c.generation, c.step)]
        last = max((commit.step for commit in commits), default=0)
        if command.status == "finished" and last != self.sim.job.steps:
            self.sim.violation(f"finished with a commit of step {last} of {self.sim.job.steps}")
        if shell.machine.memory.spec is not None and shell.heard and not shell.machine.memory.distrust_slots:
            best = max(self.slot_steps(shell, chain), default=0)
            if best > last:
                self.sim.violation(f"ended with a commit of step {last}, but {best} was to be had")
        if command.status == "failed" and command.detail != "a bad step":
            self.sim.violation(f"failed, and not for the bad step: {command.detail}")
        for commit in commits:
            self._exact(self.sim.storage.histories[commit.manifest], commit.step)
        self._uses_all_it_can(shell)
        if busy := [w.name for n in self.sim.nodes.values() for w in n.workers.values() if self._at_work(w)]:
            self.sim.violation(f"the run ended while {', '.join(busy)} were in a generation")

    def _abort_has_a_reason(self, shell: CoordinatorProtocol) -> None:
        """Check that no generation is torn apart in which everybody trains and is heard."""
        spec = shell.machine.memory.spec
        generation = None if spec is None else self.sim.generations.get(spec.id)
        if self.sim.shell is not shell or generation is None or generation.broken or generation.ended:
            return
        members = generation.members()
        well = len(members) == len(generation.spec.members) and all(w.paged and not w.hung for w in members)
        incident = shell.machine.memory.incident
        kind = None if incident is None else incident.kind
        # a coordinator may hear of a stall when it is over: it was stopped, or the message was late
        unread = any(w.read_again_at and not self.sim.reachable(w.node) for w in members)
        stalled = kind is FailureKind.HANG and (generation.complained or unread)
        late = kind is FailureKind.LATE and self.sim.now - generation.made_at <= BEGUN_S  # not heard of yet
        # who was never called by the coordinator before says so
        late |= kind is FailureKind.PEER_LOST and any(w.generation is not generation for w in members)
        lost = kind in (FailureKind.NODE_LOST, None)  # None: the run was stopping, and ended with it
        silent = lost and not all(self.sim.reachable(w.node) for w in members)
        if well and not (stalled or late or silent):
            self.sim.violation(f"generation {generation.spec.id} was aborted in good health")

    def _uses_all_it_can(self, shell: CoordinatorProtocol) -> None:
        """Check that, long after the last fault, a run trains on as many workers as its planner wants."""
        spec = shell.machine.memory.spec
        if spec is None or self.stepped_at < max(self.sim.quiet_at, self.launched_at) + CALM_S:
            return
        room = sum(node.capacity for node in self.sim.nodes.values())
        wanted = self.sim.choose(min(room, self.sim.most_workers), (), 0, 0).layout.world_size
        if len(spec.members) < wanted:
            self.sim.violation(f"ended on {len(spec.members)} workers, {wanted} were to be had")

    def _at_work(self, worker: WorkerProtocol) -> bool:
        """Whether a worker is in a generation, alive, and within reach."""
        return worker.generation is not None and not worker.hung and self.sim.reachable(worker.node)

    # --- launches -------------------------------------------------------------------------------------

    def launched(self, shell: CoordinatorProtocol, spec: m.GenerationSpec) -> None:
        """Check a launch before the order goes out."""
        if spec.id in self.specs:
            self.sim.violation(f"generation {spec.id} was launched twice")
        names = {member.worker for member in spec.members}
        if len(names) != len(spec.members) or len(names) != spec.layout.world_size:
            self.sim.violation(f"generation {spec.id} has {len(names)} members for {spec.layout}")
        if self.sim.shell is shell and len(names) > self.sim.most_workers:
            self.sim.violation(f"generation {spec.id} has more than max_workers members")
        chains = self.histories.chains(shell, shell.newest)
        self._source_is_sound(shell, spec, chains)
        self.histories.launched(shell, spec)
        self._does_not_begin_anew(shell, spec, chains)
        if self.sim.shell is shell:
            self._source_is_newest(shell, spec, chains)
        self.specs[spec.id] = spec
        self.launched_at = self.sim.now

    def _does_not_begin_anew(
        self, shell: CoordinatorProtocol, spec: m.GenerationSpec, chains: list[Chain]
    ) -> None:
        """Check that a run with commits begins anew by a rewind to before all of them alone."""
        if spec.source.kind != "init" or not shell.commits:
            return
        counting = [c for c in shell.commits if any(valid(x, c.generation, c.step) for x in chains)]
        if counting or not goes_back(shell, spec, chains):
            steps = sorted({commit.step for commit in shell.commits})
            self.sim.violation(f"{spec.id} begins from initial weights, and there are commits at {steps}")

    def _source_is_sound(
        self, shell: CoordinatorProtocol, spec: m.GenerationSpec, chains: list[Chain]
    ) -> None:
        source = spec.source
        if source.generation is None:
            return
        if not any(valid(chain, source.generation, source.step) for chain in chains):
            self.sim.violation(f"{spec.id} resumes from the void state {source.step} of {source.generation}")
        if source.kind == "slots":
            if {(slot.generation, slot.step) for slot in source.slots} != {(source.generation, source.step)}:
                self.sim.violation(f"{spec.id} resumes from a mixture of states")
            if not complete(source.slots, self.specs[source.generation].layout):
                self.sim.violation(f"{spec.id} resumes from an incomplete state")
            if any(slot.identity in shell.quarantined for slot in source.slots):
                self.sim.violation(f"{spec.id} resumes from a quarantined slot")
            self._exact(self.history_of(source.slots), source.step)

    def _source_is_newest(
        self, shell: CoordinatorProtocol, spec: m.GenerationSpec, chains: list[Chain]
    ) -> None:
        memory, resume_step = shell.machine.memory, self.sim.job.checkpoint.resume_step
        if resume_step is not None and not self.histories.went_back(chains, resume_step):
            if spec.resume_step != resume_step:
                self.sim.violation(f"{spec.id} resumes from {spec.resume_step}, asked for was {resume_step}")
            return
        if self.histories.rewound(shell, spec, chains):
            return
        if self.sim.now < self.stranger_at + STRANGERS_S:
            return
        slots = memory.remedy not in (Remedy.COMMIT, Remedy.SHRINK)
        best = min(self._best(shell, chain, slots) for chain in chains)
        if spec.resume_step < best:
            self.sim.violation(f"{spec.id} resumes from step {spec.resume_step}, but {best} was to be had")

    def _best(self, shell: CoordinatorProtocol, chain: Chain, slots: bool) -> int:
        """Step of the newest state of a history that was to be had."""
        best = max([0, *self.commit_steps(shell, chain), *self._old_commits(chain)])
        return max([best, *self.slot_steps(shell, chain)]) if slots else best

    def _old_commits(self, chain: Chain) -> Iterator[int]:
        """Steps of commits that have been in the log for so long that every coordinator must know of them."""
        storage = self.sim.storage
        disturbed = (
            max(storage.down_until, storage.slow_until, storage.hung_until, self.sim.noise_until)
            + LONGEST_REPLY_S
        )
        if self.sim.now < max(disturbed, storage.mute_until + ASKED_AGAIN_S if storage.mute_until else 0.0):
            return
        for commit in storage.commits():
            old = self.sim.now - storage.times[commit.seq - 1] > LONGEST_REPLY_S
            good = commit.manifest not in self.sim.bad_manifests
            if old and good and valid(chain, commit.generation, commit.step):
                yield commit.step

    def commit_steps(self, shell: CoordinatorProtocol, chain: Chain) -> Iterator[int]:
        for commit in shell.commits:
            if commit.manifest not in self.sim.bad_manifests and valid(chain, commit.generation, commit.step):
                yield commit.step

    def slot_steps(self, shell: CoordinatorProtocol, chain: Chain, freed: str = "") -> Iterator[int]:
        """Steps of all complete states that the coordinator could have known of, also on node ``freed``."""
        states: dict[tuple[m.GenerationId, int], list[m.SlotInfo]] = defaultdict(list)
        for name in filter(None, dict.fromkeys([*shell.machine.memory.roster.nodes, freed])):
            node = self.sim.nodes.get(name)
            if node is None or not (name in shell.heard or self.sim.reachable(node)):
                continue
            for held in node.slots.values():
                if held.info.identity not in shell.quarantined:
                    states[held.info.generation, held.info.step].append(held.info)
        for (generation, step), slots in states.items():
            known = self.specs.get(generation)
            if known is not None and valid(chain, generation, step) and complete(slots, known.layout):
                yield step

    # --- history ------------------------------------------------------------------------------------------

    def counts(self, newest: m.GenerationSpec | None, generation: m.GenerationId, step: int) -> bool:
        """Whether a state is part of the history that ends in ``newest``."""
        return newest is None or valid(self.histories.walk(newest), generation, step)

    def history_of(self, slots: Iterable[m.SlotInfo]) -> StepHistory:
        """The one history that all slots hold."""
        found = {self.slots[slot.identity].history for slot in slots if slot.identity in self.slots}
        if len(found) != 1:
            self.sim.violation(f"{len(found)} histories in one set of slots")
            return ()
        return found.pop()

    def _exact(self, history: StepHistory, step: int) -> None:
        """Check that a history holds each step once, in order, up to ``step``."""
        at = 0
        for generation, first, last in history:
            if first != at or last <= first:
                self.sim.violation(f"history of step {step}: {generation} did {first}..{last} after {at}")
                return
            at = last
        if at != step:
            self.sim.violation(f"history of step {step} ends at {at}")

    def deleted(self, info: m.SlotInfo) -> None:
        """Check that no generation has to take its state from a slot that is deleted or written over."""
        newest = None if self.sim.shell is None else self.sim.shell.newest
        if newest is None or info.identity not in newest.source.identities:
            return
        generation = self.sim.generations.get(newest.id)
        if generation is None or generation.step <= newest.resume_step:
            self.sim.violation(f"{info.slot} was deleted while {newest.id} restores from it")

    def freed(self, shell: CoordinatorProtocol, name: str) -> None:
        """Check that nothing is given back that somebody works on, or that alone holds the newest state."""
        node = self.sim.nodes.get(name)
        if node is None or self.sim.shell is not shell or not self.sim.reachable(node):
            return
        if busy := [worker.name for worker in node.workers.values() if self._at_work(worker)]:
            self.sim.violation(f"{name} was given back while {', '.join(busy)} were at work")
        memory, chain = shell.machine.memory, self.histories.chains(shell, shell.newest)[-1]
        if memory.distrust_slots:
            return  # the run goes on from a commit, whatever else is held
        needed = 0 if memory.spec is None else memory.spec.resume_step
        if memory.state is MachineState.WAITING:
            needed = max(needed, memory.held_step)
        # a commit that is damaged in storage counts: nobody can know that yet
        stored = [c.step for c in shell.commits if valid(chain, c.generation, c.step)]
        held = max([*self.slot_steps(shell, chain, freed=name), *stored], default=0)
        left = max([*self.slot_steps(shell, chain), *stored], default=0)
        if min(needed, held) > left:  # what was lost before cannot be lost with it
            self.sim.violation(f"{name} was given back with the only copy of step {needed}")

    def ordered(self, node: NodeProtocol, term: int, obeyed: bool) -> None:
        """Check that a node obeys nobody but the newest coordinator that it has heard of."""
        newest = self.terms[node.name] = max(term, self.terms.get(node.name, 0))
        if obeyed and term < newest:
            self.sim.violation(f"{node.name} obeys term {term}, and has heard of term {newest}")

    def summed_up(self, term: int) -> None:
        """Check that nobody but the newest coordinator writes the run's summary."""
        if term < self.sim.storage.term:
            self.sim.violation(f"the summary is of term {term}, and the log has term {self.sim.storage.term}")

    def store_failed(self, shell: CoordinatorProtocol, home: str, times: int | None = None) -> None:
        """Note what a coordinator hears of a node's rendezvous stores; ``times``: None: one more failure."""
        self.orders.store_failed(shell, home, times)

    def store_asked(self, shell: CoordinatorProtocol, home: str, spec: m.GenerationSpec) -> None:
        """Check the node that is asked for a rendezvous store."""
        self.orders.store_asked(shell, home, spec)

    def stepped(self, generation: GenerationProtocol) -> None:
        """Note that a step was finished just now."""
        self.stepped_at = self.sim.now
        self.promptness.stepped(generation)

    def skipped(self, node: NodeProtocol, generation: GenerationProtocol) -> None:
        """Note that a snapshot found no file that it may write over."""
        self.promptness.skipped(node, generation)

    def removed(self, node: NodeProtocol) -> None:
        """Note that a node went without a word."""
        self.promptness.removed(node)

    def unpaged(self, workers: Sequence[WorkerProtocol]) -> None:
        """Note that pages of workers are gone."""
        self.promptness.unpaged(workers)

    def left(self, node: NodeProtocol, noticed_at: float) -> None:
        """Note that a node's time is over."""
        self.promptness.left(node, noticed_at)

    def log(self) -> None:
        """Check at the end that the log had one writer at a time."""
        terms = [entry.term for entry in self.sim.storage.log]
        if terms != sorted(terms):
            self.sim.violation(f"terms go back in the log: {terms}")
        for complaint in self.sim.storage.complaints:
            self.sim.violation(complaint)
