"""A simulated coordinator process: claims a term, feeds its machine, carries out the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.policies.store_home import SILENT_BEATS, StoreHomes, StoreSearch, asked_s
from picotron_ray.coordinator.simulator.nodes import SimNode
from picotron_ray.coordinator.simulator.planning import SimPlanner, default
from picotron_ray.coordinator.simulator.world import RETRY_S, Sim

START_FAILED_S = 2.0  # from a call for a store to the word that it does not start
MOST_ERRORS = 3  # such words, after which the node counts as lost


class Shell:
    """One incarnation of the coordinator."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.machine = Machine(sim.job, default=default)
        self.planner = SimPlanner(sim.choose, sim.rng)
        self.term = 0
        self.alive = True
        self.ending = False  # it is about to end the run, and hears nothing any more
        self.paused_until = 0.0
        self.born_at = sim.now  # later, when it began to hear: storage may have kept it waiting
        self.told_seals: set[tuple[str, m.GenerationId, int]] = set()
        self.newest: m.GenerationSpec | None = None  # newest generation known to it
        self.heard: set[str] = set()  # nodes whose inventory arrived in the present round
        self.commits: list[m.Commit] = []  # known to it
        self.fenced = False
        self.stopping = False  # it knows that the user wants the run to stop
        self.quarantined: set[m.SlotIdentity] = set()
        self.finished: m.Finish | None = None
        self.stores = StoreHomes()
        self.search = StoreSearch()
        self.remembered: Callable[[], dict[str, Any]] = dict  # of earlier terms, by the run's record
        self._asked: dict[str, int] = {}  # newest request for a node's inventory
        self._tick_at = 0.0
        self._wake_at = 0.0
        self._queue: list[m.Event] = []  # while paused, or before Begin

    # --- life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Claim a term as soon as storage lets it, then hear what is there."""
        if not self.alive:
            return
        if self.sim.now < max(self.sim.storage.down_until, self.sim.storage.hung_until):
            self.sim.after(RETRY_S, self.start)
            return
        self._claimed(self.sim.storage.claim())

    def _claimed(self, term: int) -> None:
        self.term = term
        self.sim.by_term[self.term] = self
        reached = [node for node in self.sim.nodes.values() if not node.away]
        for node in reached:
            self.sim.accepted(node, self.term)
        self.sim.after(0.2, self._begin, reached)

    def _begin(self, reached: list[SimNode]) -> None:
        """Begin with what the agents said, then the nodes, then what came in meanwhile."""
        if not self.alive:
            return
        if self.sim.now < self.paused_until:
            self.sim.after(self.paused_until - self.sim.now + 0.01, self._begin, reached)
            return
        living = [node for node in reached if self.sim.nodes.get(node.name) is node]
        specs = [node.spec for node in living if node.spec is not None]
        running = max(specs, key=lambda spec: spec.id, default=None)
        workers = tuple(m.Member(w.name, n.name) for n in living for w in n.workers.values() if w.shown)
        busy = tuple(
            m.BusyWorker(w.name, w.generation.spec.id)
            for n in living
            for w in n.workers.values()
            if w.shown and w.generation is not None
        )
        commits, known = self.read_log()
        self.commits = list(commits)
        self.newest = max([*known, *specs], key=lambda spec: spec.id, default=None)
        waiting, self._queue = self._queue, []
        said = [node.joined() for node in living]
        kept = tuple(slot for each in said for slot in each.kept)
        kept_by = max((each.kept_by for each in said if each.kept_by), key=lambda spec: spec.id, default=None)
        self.newest = max(filter(None, (self.newest, kept_by)), key=lambda spec: spec.id, default=None)
        keeping = {} if running else self.sim.keeping()
        self.born_at = self.sim.now
        words = self.term, tuple(self.commits), known, running, workers, busy, kept, kept_by
        self.deliver(m.Begin(*words, keeping=keeping, **self.remembered()))
        for node in living:
            self.deliver(node.joined())
            if node.leaves_at is not None:  # Ray tells it as long as it lasts
                self.deliver(m.DrainNotice(node.name, node.leaves_at))
            node.tell_seals()
        for node in self.sim.nodes.values():
            if node not in living:
                node.hello()
        for event in waiting:
            self.deliver(event)
        self._tick()

    def read_log(self) -> tuple[tuple[m.Commit, ...], tuple[m.GenerationSpec, ...]]:
        """Commits and generations, as the log holds them when the term begins."""
        return self.sim.storage.commits(), self.sim.storage.generations()

    def die(self) -> None:
        self.alive = False

    # --- events in, commands out ------------------------------------------------------------------------

    def deliver(self, event: m.Event) -> None:
        """Hand one event to the machine, once it has begun and is not paused."""
        if not self.alive or self.ending:
            return
        sim = self.sim
        if sim.now < self.paused_until:
            self._queue.append(event)
            return
        if self.machine.memory.term == 0 and not isinstance(event, m.Begin):
            self._queue.append(event)
            return
        if isinstance(event, m.Inventory) and event.request == self._asked.get(event.node):
            self.heard.add(event.node)  # else it answers an earlier coordinator, or question
        elif isinstance(event, m.NodeJoined) and event.kept_by is not None:
            self.newest = max(self.newest or event.kept_by, event.kept_by, key=lambda spec: spec.id)
        elif isinstance(event, m.Appended) and event.kind == "commit" and event.seq > 0:
            self.commits.append(
                m.Commit(event.step, event.generation, event.manifest, event.seq, event.digest)
            )
        elif isinstance(event, m.Retired):
            self.commits = [commit for commit in self.commits if commit.manifest not in event.manifests]
        if isinstance(event, m.SnapshotSealed):
            self.told_seals.add((event.node, event.generation, event.step))
        sim.events += 1
        commands = self.machine.handle(event, sim.now)
        sim.checks.handled(self, event, commands)
        for command in commands:
            getattr(self, EXECUTE[type(command)])(command)
        wake = None if self.machine.memory.quiet else self.machine.wake_at
        if wake is not None and wake < self._tick_at - 0.01 and not sim.now < self._wake_at <= wake:
            self._wake_at = wake
            sim.after(max(0.0, wake - sim.now) + 0.001, self.deliver, m.Tick())

    def _tick(self) -> None:
        if not self.alive or self.sim.over:
            return
        self._tick_at = self.sim.now + 1.0
        self.deliver(m.Tick())
        self.sim.after(1.0, self._tick)

    def pause(self, seconds: float) -> None:
        """Stop for a while, as by SIGSTOP; events that arrive meanwhile are handled afterwards."""
        self.paused_until = self.sim.now + seconds
        self.sim.after(seconds + 0.001, self._resume)

    def _resume(self) -> None:
        if self.sim.now >= self.paused_until:
            waiting, self._queue = self._queue, []
            for event in waiting:
                self.deliver(event)

    # --- commands --------------------------------------------------------------------------------------

    def start_worker(self, command: m.StartWorker) -> None:
        reached = self.sim.to_node(
            command.node, self.term, lambda node: node.start_worker(command.worker), retry=True
        )
        if not reached:
            self.sim.after(0.5, self.deliver, m.WorkerExited(command.worker, "start_failed"))

    def run_generation(self, command: m.RunGeneration) -> None:
        spec = command.spec
        self.search.begin(spec)
        if command.adopt:
            self._call_without_store(spec)
            return
        self.sim.checks.launched(self, spec)
        self.newest = spec
        self._find_store(spec, 0)

    def _find_store(self, spec: m.GenerationSpec, errors: int) -> None:
        """Ask for a rendezvous store, and call the members once there is one."""
        if not self.alive or not self.search.goes_on(spec.id):
            return
        home = self._store_home(spec)
        self.sim.checks.store_asked(self, home, spec)
        node = self.sim.nodes.get(home)
        trouble = "" if node is None else node.asked_for_store()
        if trouble in ("mute", "broken"):
            limit_s = asked_s(self.sim.job.elastic.node_timeout_s)
            delay_s = limit_s if trouble == "mute" else min(limit_s, START_FAILED_S)
            self.sim.after(delay_s, self._no_store, spec, home, errors + (trouble == "broken"))
            return
        if node is not None:
            self.stores.answered(home, node.stores_replaced)
            if node.stores_replaced:
                self.sim.checks.store_failed(self, home, node.stores_replaced)
        if self._store_home(spec) != home:
            self.sim.after(self.sim.latency(), self._find_store, spec, errors)
            return
        self.sim.checks.store_asked(self, home, spec)
        if trouble and node is not None:
            self.sim.generation(spec).store_frozen = True
            node.stores_replaced += 1
        if self.search.end(spec.id):
            self._call_members(spec)

    def _store_home(self, spec: m.GenerationSpec) -> str:
        roster, silent_s = self.machine.memory.roster, SILENT_BEATS * self.sim.job.elastic.heartbeat_s
        silent = set(roster.silent_nodes(self.sim.now, silent_s))
        return self.stores.home(spec, silent.__contains__)

    def _no_store(self, spec: m.GenerationSpec, home: str, errors: int) -> None:
        """Hear that a node gave no address; an error that comes again counts as the node's loss."""
        if not self.alive:
            return
        self.stores.failed(home)
        self.sim.checks.store_failed(self, home)
        if errors < MOST_ERRORS or not self.search.goes_on(spec.id):
            self._find_store(spec, errors)
            return
        self.stores.forget(home)
        self.sim.checks.store_failed(self, home, 0)
        self.deliver(m.NodeLost(home, "no rendezvous store"))
        if self.search.end(spec.id):  # else it was given up for the loss
            self._call_members(spec, store=False, but=home)
        if home in self.sim.nodes:
            self.sim.after(RETRY_S, self.sim.nodes[home].hello)

    def _call_without_store(self, spec: m.GenerationSpec) -> None:
        self.search.end(spec.id)
        self._call_members(spec, store=False)

    def _call_members(self, spec: m.GenerationSpec, store: bool = True, but: str = "") -> None:
        """Call all members, but those on one node; without a store they only join what they run."""

        def call(member: m.Member) -> Callable[[SimNode], None]:
            def run(node: SimNode) -> None:
                if store and (node.spec is None or node.spec.id < spec.id):
                    node.spec = spec
                worker = node.workers.get(member.worker)
                if worker is None:
                    node.report(m.WorkerExited(member.worker, "unknown"), reliable=True)
                else:
                    worker.run(spec, not store)

            return run

        for member in spec.members:
            if member.node != but and not self.sim.to_node(member.node, self.term, call(member), retry=True):
                self.sim.after(0.5, self.deliver, m.WorkerExited(member.worker, "unknown"))

    def on_worker(self, name: str, call: Callable[[SimNode], None]) -> bool:
        worker = self.sim.worker(name)
        return worker is not None and self.sim.to_node(worker.node.name, self.term, call, retry=False)

    def interrupt(self, command: m.Interrupt) -> None:
        if (uncalled := self.search.given_up(command)) is not None:
            self._call_without_store(uncalled)

        def call(node: SimNode) -> None:
            worker = node.workers.get(command.worker)
            if worker is not None:
                worker.interrupt(command.generation, command.mode)

        self.on_worker(command.worker, call)

    def kill_worker(self, command: m.KillWorker | m.StopWorker) -> None:
        if not self.on_worker(command.worker, lambda node: node.kill(command.worker)):
            self.sim.after(0.1, self.deliver, m.WorkerExited(command.worker, "unknown"))

    def collect(self, command: m.CollectInventory) -> None:
        self._asked[command.node] = command.request
        self.sim.to_node(command.node, self.term, lambda node: node.collect(command.request), retry=False)

    def upload(self, command: m.Upload) -> None:
        self.sim.to_node(command.node, self.term, lambda node: node.upload(command), retry=False)

    def release(self, command: m.Release) -> None:
        words = command.generation, command.step, command.keep, command.committed
        self.sim.to_node(command.node, self.term, lambda node: node.release(*words), retry=True)

    def keep_slots(self, command: m.KeepSlots) -> None:
        """Mark slots on a node, which may die with all of its processes."""
        self.sim.to_node(
            command.node, self.term, lambda node: node.mark(command.generation, command.step), retry=True
        )

    def quarantine(self, command: m.Quarantine) -> None:
        self.sim.to_node(command.node, self.term, lambda node: node.quarantine(command), retry=True)

    def free_node(self, command: m.FreeNode) -> None:
        self.sim.checks.freed(self, command.node)
        self.sim.to_node(command.node, self.term, lambda node: node.free(), retry=True)

    def snapshot(self, command: m.TakeSnapshot) -> None:
        generation = self.sim.generations.get(command.generation)
        if generation is not None and not self.sim.lost():
            generation.pin_next = True

    def append(self, command: m.AppendGeneration | m.AppendCommit) -> None:
        """Write a log entry; storage may be down (an error after a while), slow, or lose the reply."""
        storage, sim = self.sim.storage, self.sim
        delay = sim.rng.uniform(0.5, 6.0) if sim.now < storage.slow_until else sim.rng.uniform(0.002, 0.05)
        sim.after(delay, self._append, command)

    def _append(self, command: m.AppendGeneration | m.AppendCommit) -> None:
        storage, sim = self.sim.storage, self.sim
        if not self.alive:
            return
        if sim.now < self.paused_until:  # the request was not sent before the process was stopped
            sim.after(self.paused_until - sim.now + 0.01, self._append, command)
            return
        if sim.now < storage.hung_until:
            sim.after(storage.hung_until - sim.now + 0.01, self._append, command)
            return
        generation = isinstance(command, m.AppendGeneration)
        if sim.now < storage.down_until:
            spec_id = command.spec.id if isinstance(command, m.AppendGeneration) else command.generation
            step = command.spec.resume_step if isinstance(command, m.AppendGeneration) else command.step
            kind: Any = "generation" if generation else "commit"
            self.deliver(m.Appended(kind, spec_id, step, error="storage is down"))
            return
        if isinstance(command, m.AppendGeneration):
            reply = storage.append_generation(self.term, command.spec)
        else:
            reply = storage.append_commit(self.term, command)
        while len(storage.times) < len(storage.log):
            storage.times.append(sim.now)
        if sim.now < storage.mute_until and sim.rng.chance(0.6):
            return
        sim.after(sim.rng.uniform(0.002, 0.02), self.deliver, reply)
        if sim.doubled():
            sim.after(sim.latency(), self.deliver, reply)

    def plan(self, command: m.PlanLayouts) -> None:
        self.planner.ask(command.questions, self.sim.now, self.sim.after, self.deliver)

    def alert(self, command: m.Alert) -> None:
        """Alerts have no effect on the cluster."""

    def finish(self, command: m.Finish) -> None:
        self.finished = command
        if self.sim.shell is self:
            self.sim.over = True

    # --- the end of the run, where another coordinator may have taken over ------------------------------

    def end(self) -> None:
        """Close the nodes and write the summary, unless the log says that this is another's to do."""
        self.ask_newest(self._end)

    def ask_newest(self, answer: Callable[[bool | None], None]) -> None:
        """Tell whether the log's newest term is this one's; None: storage does not answer."""
        storage = self.sim.storage
        away = self.sim.now < max(storage.down_until, storage.hung_until)
        answer(None if away else storage.term == self.term)

    def _end(self, newest: bool | None) -> None:
        if newest is False:
            return
        for name in list(self.sim.nodes):
            self.sim.to_node(name, self.term, lambda node: node.close(), retry=False)
        self.sim.after(1.0, self.sum_up)

    def sum_up(self) -> None:
        """Write the run's summary, where the log lets it."""
        self.ask_newest(lambda newest: self.sim.checks.summed_up(self.term) if newest else None)


EXECUTE: dict[type[Any], str] = {  # by name: a kind of its own may do some of them its own way
    m.StartWorker: "start_worker",
    m.StopWorker: "kill_worker",
    m.KillWorker: "kill_worker",
    m.RunGeneration: "run_generation",
    m.Interrupt: "interrupt",
    m.CollectInventory: "collect",
    m.Upload: "upload",
    m.AppendGeneration: "append",
    m.AppendCommit: "append",
    m.Release: "release",
    m.KeepSlots: "keep_slots",
    m.TakeSnapshot: "snapshot",
    m.Quarantine: "quarantine",
    m.PlanLayouts: "plan",
    m.FreeNode: "free_node",
    m.Alert: "alert",
    m.Finish: "finish",
}


def start_shell(sim: Sim) -> None:
    """Start a coordinator process of the simulation's kind."""
    sim.shell = (sim.shell_class or Shell)(sim)
    sim.shell.start()
