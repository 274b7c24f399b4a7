"""Clock, network and coordinator processes of the simulation."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.plan_book import Choose
from picotron_ray.coordinator.simulator.nodes import SimNode, SimWorker
from picotron_ray.coordinator.simulator.protocols import (
    CoordinatorProtocol,
    GenerationProtocol,
    NodeProtocol,
    Observer,
    WorkerProtocol,
)
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.slots import StepHistory
from picotron_ray.coordinator.simulator.storage import SimStorage
from picotron_ray.coordinator.simulator.training import SimGeneration

RESTART_S = 2.0  # a dead coordinator is back after this long
SETTLED_S = 10.0  # after a disturbance: until everything has been asked again
RETRY_S = 1.0  # a call whose reply was lost is confirmed through the agent


class Sim:
    """One simulated run. ``after`` schedules; ``run`` goes on until the run is over.

    A subclass may have parts of its own: nodes, coordinators, storage.
    """

    node_class: type[SimNode] = SimNode
    shell_class: Callable[[Any], CoordinatorProtocol] | None = None  # None: ``shell.Shell``

    def __init__(self, seed: int, job: JobConfig, choose: Choose, checks: Observer) -> None:
        self.rng, self.job, self.choose, self.checks = Rng(seed), job, choose, checks
        self.now = 0.0
        self.step_s = 1.0  # of a step, however many do it
        self.start_failures = 0.0  # share of worker starts that fail
        self.start_hangs_until = 0.0  # by then the coordinator has given up a start that hangs
        self.cursed: Callable[[GenerationProtocol], WorkerProtocol | None] = lambda generation: (
            None
        )  # who fails
        self.debugged: set[str] = set()  # workers that a debugger is attached to
        self.bad_step = 0  # step that every generation finds bad, and ends before; 0: none
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = itertools.count()  # calls of one time come in the order of their planning
        self.events = 0  # handled by machines
        self.nodes: dict[str, SimNode] = {}
        self.ghosts: set[str] = set()  # nodes that are gone and nobody was told
        self.names = 0  # nodes ever made
        self.storage = SimStorage()
        self.generations: dict[m.GenerationId, SimGeneration] = {}
        self.bad_manifests: set[str] = set()
        self.noise_until = 0.0  # messages are lost, doubled and late before this time
        self.shell: CoordinatorProtocol | None = None  # the present coordinator
        self.by_term: dict[int, CoordinatorProtocol] = {}  # all of them
        self.struck_at = self.changed_at = 0.0  # the newest fault; a node that came or went
        self.stuns: list[float] = []  # how long the next agents freeze that are asked for a store ...
        self.stuns_until = 0.0  # ... before this time
        self.parted: set[str] = set()  # two nodes that do not reach each other ...
        self.parted_until = 0.0  # ... before this time
        self.quiet_at = 0.0  # when the last fault is over
        self.over = self.stop_asked = False
        self.struck: list[str] = []  # names of the faults so far
        self.failures: list[str] = []

    # --- clock --------------------------------------------------------------------------------------

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._count), call, args))

    def run(self, limit_s: float) -> None:
        """Run until the run is over, an invariant is broken, or ``limit_s`` after the last fault."""
        while self._heap and not self.over and not self.failures:
            at, _, call, args = heapq.heappop(self._heap)
            if at > max(self.quiet_at, 0.0) + limit_s:
                self.violation(f"no end {limit_s:g} s after the last fault")
                return
            self.now = at
            call(*args)

    def restart_clock(self) -> None:
        """Forget everything that is under way: all processes are gone, and storage is up again."""
        self._heap.clear()
        self.over = self.stop_asked = False
        self.shell, self.storage.down_until, self.noise_until = None, 0.0, 0.0

    def keeping(self) -> dict[str, int]:
        """Newest step that each node keeps of an earlier launch, as far as Ray knows the node."""
        return {}

    def settle(self) -> None:
        """Check, after the end, what the run leaves behind."""

    def close(self) -> None:
        """Let go of what the simulation holds beside memory."""

    def violation(self, text: str) -> None:
        self.failures.append(f"at {self.now:.3f} s: {text}")

    # --- cluster --------------------------------------------------------------------------------------

    def new_name(self) -> str:
        """Name for a node that has yet to come."""
        self.names += 1
        return f"n{self.names}"

    def add_node(self, capacity: int, told: bool = True, name: str = "") -> SimNode:
        """Add a node; the coordinator hears of it a little later, where it is ``told``."""
        self.changed_at = self.now
        name = name or self.new_name()
        node = self.nodes[name] = self.node_class(self, name, capacity)
        if told:
            node.report(node.joined(), reliable=True)
        self.after(self.rng.random(), self._beat, node)
        return node

    def _beat(self, node: SimNode) -> None:
        if self.nodes.get(node.name) is not node:
            return
        ready = [worker for worker in node.workers.values() if worker.shown]
        newest = max((worker.last for worker in ready if worker.last is not None), default=None)
        steps = {worker.name: worker.step for worker in ready if newest is not None and worker.last == newest}
        others = tuple(worker.name for worker in ready if worker.name not in steps)
        rescued = tuple(worker.name for worker in ready if worker.rescued)
        stays = [
            worker.generation.held_since for worker in ready if worker.name in steps and worker.generation
        ]
        held = any(since is not None for since in stays)
        debugged = tuple(name for name in steps if name in self.debugged)
        event = m.Heartbeat(node.name, newest, steps, others, rescued, held, debugged)
        if self.now < self.noise_until or self.shell is None or node.away or node.loses:
            node.report(event)
        else:
            self.shell.deliver(event)
        self.after(self.job.elastic.heartbeat_s, self._beat, node)

    def remove_node(self, node: SimNode, *, told: bool) -> None:
        """Remove a node with its workers and slots.

        Args:
            told: Ray notices; otherwise only its silence does.
        """
        self.changed_at = self.now
        if not told:
            self.ghosts.add(node.name)
            self.checks.removed(node)
        for worker in list(node.workers.values()):
            node.worker_dies(worker, "killed")
        del self.nodes[node.name]
        if told:
            self.after(self.rng.uniform(0.2, 2.0), self.tell, m.NodeLost(node.name, "removed"))

    def worker(self, name: str) -> SimWorker | None:
        return next((node.workers[name] for node in self.nodes.values() if name in node.workers), None)

    @property
    def most_workers(self) -> int:
        """Most workers that a generation may have now."""
        return self.job.cluster.max_workers

    @property
    def launched(self) -> bool:
        """Whether a generation ever was."""
        return bool(self.generations)

    def start_hangs(self) -> None:
        """Note that a worker neither starts nor fails: less may do until it is given up."""
        self.start_hangs_until = self.now + self.job.cluster.start_timeout_s + SETTLED_S
        self.quiet_at = max(self.quiet_at, self.start_hangs_until)

    def generation(self, spec: m.GenerationSpec) -> SimGeneration:
        """The one object behind all members of ``spec``."""
        if spec.id not in self.generations:
            self.generations[spec.id] = SimGeneration(self, spec, self._history(spec))
        known = self.generations[spec.id]
        if known.spec != spec:
            self.violation(f"generation {spec.id} was used twice")
        return known

    def _history(self, spec: m.GenerationSpec) -> StepHistory:
        source = spec.source
        if source.kind == "init":
            return ()
        if source.kind == "commit":
            if source.digest != self.storage.digest(source.manifest):
                self.violation(f"generation {spec.id} reads a manifest by digest {source.digest!r}")
            return self.storage.histories[source.manifest]
        return self.checks.history_of(source.slots)

    def unreadable(self, source: m.Source) -> str:
        """Reason for which a restore from ``source`` fails now; empty: it does not."""
        if source.manifest in self.bad_manifests:
            return f"corrupt:{source.manifest}"
        for slot in source.slots:
            node = self.nodes.get(slot.node)
            held = None if node is None else node.slots.get(slot.slot)
            if held is None or held.info.identity != slot.identity:
                return "error: a source slot is gone"
            if held.corrupt:
                return f"corrupt:{slot.slot}"
        return ""

    def parts(self, names: set[str]) -> bool:
        """Whether some of these nodes do not reach each other now."""
        return self.now < self.parted_until and self.parted <= names

    def hold_s(self) -> float:
        """Seconds for which a generation is to stay at the boundary where it is; 0: it goes on."""
        return 0.0

    def stepped(self, generation: GenerationProtocol) -> None:
        self.checks.stepped(generation)

    # --- network ------------------------------------------------------------------------------------

    def latency(self) -> float:
        noisy = self.now < self.noise_until and self.rng.chance(0.3)
        return self.rng.uniform(0.2, 2.5) if noisy else 0.001 + self.rng.below(9) * 0.001

    def reachable(self, node: NodeProtocol) -> bool:
        """Whether a node's messages have all gone through lately."""
        return self.now > max(self.noise_until, *node.disturbed_until()) + SETTLED_S

    def lost(self) -> bool:
        return self.now < self.noise_until and self.rng.chance(0.2)

    def doubled(self) -> bool:
        return self.now < self.noise_until and self.rng.chance(0.2)

    def tell(self, event: m.Event) -> None:
        """Deliver an event that arises at the coordinator's own side."""
        if self.shell is not None:
            self.shell.deliver(event)

    def to_coordinator(self, node: NodeProtocol, event: m.Event, reliable: bool) -> None:
        """Send an event from an agent. ``reliable``: it is sent again until it has arrived, maybe twice."""
        gone = self.nodes.get(node.name) is not node
        if gone and (node.name in self.ghosts or not isinstance(event, m.WorkerExited)):
            return
        if self.now < node.frozen_until:
            self.after(node.frozen_until - self.now + 0.001, self.to_coordinator, node, event, reliable)
            return
        if node.drops() or self.lost():
            if reliable:
                self.after(RETRY_S, self.to_coordinator, node, event, True)
            return
        shell = self.shell
        if shell is None:
            if reliable and not isinstance(event, (m.Outcome, m.WorkerExited)):
                self.after(RETRY_S, self.to_coordinator, node, event, True)
            return
        self.after(self.latency(), shell.deliver, event)
        if self.doubled():
            self.after(self.latency() + 0.05, shell.deliver, event)

    def to_node(self, name: str, term: int, call: Callable[[SimNode], None], *, retry: bool) -> bool:
        """Send a call from a coordinator; False where the node is known to be gone. Old terms are refused."""
        node = self.nodes.get(name)
        if node is None:
            return name in self.ghosts
        if node.cut or self.now < node.deaf_until or self.lost():
            if retry:
                self.after(RETRY_S, self.to_node_again, name, term, call)
            return True
        self.after(self.latency(), self._arrive, node, term, call)
        if self.doubled():
            self.after(self.latency() + 0.05, self._arrive, node, term, call)
        return True

    def to_node_again(self, name: str, term: int, call: Callable[[SimNode], None]) -> None:
        self.to_node(name, term, call, retry=True)

    def _arrive(self, node: SimNode, term: int, call: Callable[[SimNode], None]) -> None:
        if self.now < node.frozen_until:
            self.after(node.frozen_until - self.now + 0.001, self._arrive, node, term, call)
        elif self.nodes.get(node.name) is node and self.accepted(node, term):
            call(node)
        elif self.nodes.get(node.name) is node and not node.drops():
            why = f"refused: term {term} is older than {node.term}"
            self.after(self.latency(), self.by_term[term].deliver, m.Fenced(why))

    def accepted(self, node: SimNode, term: int) -> bool:
        """Whether a node obeys an order of that term."""
        obeyed = node.accepts(term)
        self.checks.ordered(node, term, obeyed)
        return obeyed
