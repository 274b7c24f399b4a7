"""Membership: the roster of nodes and workers, and the policies that pick from it.

The roster is the machine's only record of the cluster. Its methods change it. The functions below it are
policies: they decide on which nodes workers start and which of them take part, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from picotron_ray.coordinator.messages import LayoutQuestion, Member, NodeTraits
from picotron_ray.coordinator.policies.worker_index import RosterWorker, Workers

START_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0)  # after the n-th failed start in a row on one node


@dataclass(slots=True)
class RosterNode:
    name: str
    capacity: int
    last_seen: float
    device_bytes: int = 0  # memory of its smallest device; 0: not known
    domain: str = ""  # failure domain; empty: its own
    has_gpus: bool = False  # else its workers compute in the host's memory
    hardware: str = ""  # product names of its GPUs
    draining: bool = False
    drain_deadline: float | None = None  # seconds on the clock of ``Machine.handle``; None: none given
    drain_noticed: float = 0.0  # on the same clock
    failed_starts: int = 0
    barred: bool = False  # no worker is started here: what it would read is not the run's
    start_after: float = 0.0  # no worker is started here before this time
    agent_gone_at: float | None = None  # when its agent was first found to be restarting; None: it speaks


@dataclass(slots=True)
class Roster:
    """Nodes and workers that live as far as is known; the order of insertion is kept."""

    nodes: dict[str, RosterNode] = field(default_factory=dict)
    workers: Workers = field(default_factory=Workers)
    joins: int = 0  # how often a node joined, or said again what it has
    leaving: set[str] = field(default_factory=set)  # nodes whose ``draining`` was set
    silent: dict[str, tuple[RosterNode, tuple[str, ...]]] = field(default_factory=dict)  # lost by that alone
    _roomy: set[str] = field(default_factory=set)  # nodes that may have room; no other one has
    _waiting: dict[str, float] = field(default_factory=dict)  # such nodes, until their ``start_after``
    _next_start: float = inf  # the first of these

    def join(self, name: str, capacity: int, now: float, traits: NodeTraits | None = None) -> bool:
        """Add a node or refresh it; True where it is new. ``traits``: None where they are not known."""
        self.joins += 1
        self._roomy.add(name)
        known = self.nodes.get(name)
        if known is None:
            node = self.nodes[name] = RosterNode(name, capacity, now)
            self._go_on_leaving(name)
        else:
            node = known
            node.capacity, node.last_seen = capacity, now
        if traits is not None:
            node.device_bytes = traits.device_bytes or node.device_bytes
            node.domain = traits.domain or node.domain
            node.has_gpus = traits.has_gpus or node.has_gpus
            node.hardware = traits.hardware or node.hardware
        return known is None

    def _go_on_leaving(self, name: str) -> None:
        """A node that was to go, and comes back after silence, is to go all the same."""
        was, _ = self.silent.get(name, (None, ()))
        if was is not None and was.draining:
            self.drain(name)
            node = self.nodes[name]
            node.drain_deadline, node.drain_noticed = was.drain_deadline, was.drain_noticed

    def lose(self, name: str, *, silent: bool) -> list[RosterWorker]:
        """Forget a node; returns its workers, which are gone with it. A silent one may speak again."""
        node = self.nodes.pop(name, None)
        self.leaving.discard(name)
        gone = self.workers.on(name)
        for worker in gone:
            del self.workers[worker.name]
        if silent and node is not None:
            self.silent[name] = (node, tuple(worker.name for worker in gone))
        else:
            self.silent.pop(name, None)
        return gone

    def in_state(self, *states: str) -> list[RosterWorker]:
        return [w for state in states for w in self.workers.by_state.get(state, {}).values()]

    def alive(self) -> list[RosterWorker]:
        """Workers that live, or start, and are to stay."""
        return [w for w in self.in_state("starting", "idle", "busy") if w.node not in self.leaving]

    def count_alive(self) -> int:
        """Number of `alive`."""
        leaving = [worker for node in self.leaving for worker in self.workers.on(node)]
        return self.workers.count("starting", "idle", "busy") - sum(w.state != "dying" for w in leaving)

    @property
    def version(self) -> tuple[int, ...]:
        """Counters that change with everything by which a layout is chosen."""
        return self.workers.version, len(self.nodes), len(self.leaving), self.joins

    def drain(self, name: str) -> None:
        """Note that a node is to go."""
        self.nodes[name].draining = True
        self.leaving.add(name)

    def start_failed(self, name: str, now: float) -> None:
        """Hold back further starts on a node after a failed one; starts that fail together count once."""
        node = self.nodes.get(name)
        if node is not None and now >= node.start_after:
            node.start_after = now + START_BACKOFF_S[min(node.failed_starts, len(START_BACKOFF_S) - 1)]
            node.failed_starts += 1

    def agent_restarts(self, name: str, now: float, patience_s: float) -> None:
        """Excuse the silence of a node whose agent is being started again, but not for ever."""
        node = self.nodes.get(name)
        if node is None:
            return
        if node.agent_gone_at is None:
            node.agent_gone_at = now
        if now - node.agent_gone_at <= patience_s:
            node.last_seen = now

    def roomy(self, now: float) -> list[RosterNode]:
        """Nodes on which a worker may be started now; looks at those alone that have changed since.

        A cluster's nodes join one by one, and thousands of answers come while a few are missing.
        """
        if now >= self._next_start:
            self._roomy.update(self._waiting)
            self._waiting.clear()
            self._next_start = inf
        self._roomy |= self.workers.vacated
        self.workers.vacated.clear()
        found = []
        for name in list(self._roomy):
            node = self.nodes.get(name)
            open_ = node is not None and not node.draining and not node.barred
            if node is None or not open_ or self.workers.count_on(name) >= node.capacity:
                self._roomy.discard(name)
            elif now < node.start_after:
                self._roomy.discard(name)
                self._waiting[name] = node.start_after
                self._next_start = min(self._next_start, node.start_after)
            else:
                found.append(node)
        return found

    def silent_nodes(self, now: float, timeout_s: float) -> list[str]:
        return [node.name for node in self.nodes.values() if now - node.last_seen > timeout_s]

    def usable(self) -> list[RosterWorker]:
        """Workers that may take part in the next generation."""
        return [
            worker
            for worker in self.in_state("idle")
            if (node := self.nodes.get(worker.node)) is not None and not node.draining
        ]

    def by_device(self, workers: list[RosterWorker]) -> list[list[RosterWorker]]:
        """All of the workers, then without those of the smallest devices, and so on; [] of none."""
        least = sorted(self._device_sizes(workers))
        if len(least) <= 1:
            return [workers] if workers else []
        return [[w for w in workers if self._device_bytes(w) in (0, *least[at:])] for at in range(len(least))]

    def question(self, workers: list[RosterWorker], most: int) -> LayoutQuestion:
        """Put the question for up to ``most`` of these workers, as `choose_members` picks them."""
        sizes = first_of(sorted(Counter(worker.node for worker in workers).values(), reverse=True), most)
        return LayoutQuestion(sum(sizes), sizes, min(self._device_sizes(workers), default=0))

    def _device_sizes(self, workers: list[RosterWorker]) -> set[int]:
        homes = {worker.node for worker in workers}
        return {self.nodes[home].device_bytes for home in homes if home in self.nodes} - {0}

    def _device_bytes(self, worker: RosterWorker) -> int:
        node = self.nodes.get(worker.node)
        return 0 if node is None else node.device_bytes


def starts(roster: Roster, wanted: int, now: float) -> list[str]:
    """Nodes on which to start a worker now (one entry each) so that ``wanted`` live: biggest node first."""
    missing = wanted - roster.count_alive()
    found: list[str] = []
    if missing <= 0:
        return found
    for node in sorted(roster.roomy(now), key=lambda node: (-node.capacity, node.name)):
        free = node.capacity - roster.workers.count_on(node.name)
        found += [node.name] * min(free, missing - len(found))
    return found


def first_of(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """Node sizes of the first ``most`` workers.

    >>> first_of([8, 8, 4], 10)
    (8, 2)
    """
    taken: list[int] = []
    left = most
    for size in sizes:
        if left <= 0:
            break
        taken.append(min(size, left))
        left -= size
    return tuple(taken)


def choose_members(
    workers: Iterable[RosterWorker], count: int, previous: Iterable[Member] = ()
) -> tuple[Member, ...]:
    """Pick ``count`` of ``workers`` in rank order: node by node, fullest first, then as ranked before.

    Neighbouring ranks share a node, so the chattiest axis (tensor parallelism) stays inside one.
    """
    rank = {member.worker: at for at, member in enumerate(previous)}
    by_node: dict[str, list[RosterWorker]] = {}
    for worker in workers:
        by_node.setdefault(worker.node, []).append(worker)
    for group in by_node.values():
        group.sort(key=lambda worker: (rank.get(worker.name, len(rank)), worker.since, worker.name))
    ordered = sorted(
        by_node.values(), key=lambda group: (-len(group), rank.get(group[0].name, len(rank)), group[0].node)
    )
    return tuple(Member(worker.name, worker.node) for group in ordered for worker in group)[:count]
