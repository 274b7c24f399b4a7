"""Membership: the roster of nodes and workers, and the policies that pick from it.

The roster is the machine's only record of the cluster. Its methods change it. The functions below it are
policies: they decide on which nodes workers start and which of them take part, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from picotron_ray.coordinator.messages import Member

Question = tuple[int, tuple[int, ...], int]
"""What the planner is asked: most workers, how many stand on each node in rank order, and the bytes of the
smallest device among theirs (0: not known)."""
START_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0)  # after the n-th failed start in a row on one node


@dataclass(slots=True)
class RosterNode:
    name: str
    capacity: int
    last_seen: float
    device_bytes: int = 0  # memory of its smallest device; 0: not known
    draining: bool = False
    failed_starts: int = 0
    start_after: float = 0.0  # no worker is started here before this time


@dataclass(slots=True)
class RosterWorker:
    name: str
    node: str
    state: Literal["starting", "idle", "busy", "dying"]
    since: float
    kills: int = 0  # how often it was ordered to die
    writing: bool = False  # dying, but may seal a snapshot until it is dead


@dataclass(slots=True)
class Roster:
    """Nodes and workers that live as far as is known; the order of insertion is kept."""

    nodes: dict[str, RosterNode] = field(default_factory=dict)
    workers: dict[str, RosterWorker] = field(default_factory=dict)
    silent: dict[str, tuple[RosterNode, tuple[str, ...]]] = field(default_factory=dict)  # lost by that alone

    def join(self, name: str, capacity: int, now: float, device_bytes: int = 0) -> bool:
        """Add a node or refresh it; True where it is new."""
        known = self.nodes.get(name)
        if known is not None:
            known.capacity, known.last_seen = capacity, now
            known.device_bytes = device_bytes or known.device_bytes
            return False
        self.nodes[name] = RosterNode(name, capacity, now, device_bytes)
        return True

    def lose(self, name: str, *, silent: bool) -> list[RosterWorker]:
        """Forget a node; returns its workers, which are gone with it. A silent one may speak again."""
        node = self.nodes.pop(name, None)
        gone = [worker for worker in self.workers.values() if worker.node == name]
        for worker in gone:
            del self.workers[worker.name]
        if silent and node is not None:
            self.silent[name] = (node, tuple(worker.name for worker in gone))
        else:
            self.silent.pop(name, None)
        return gone

    def in_state(self, *states: str) -> list[RosterWorker]:
        return [worker for worker in self.workers.values() if worker.state in states]

    def alive(self) -> list[RosterWorker]:
        """Workers that live, or start, and are to stay."""
        leaving = [node.name for node in self.nodes.values() if node.draining]
        return [w for w in self.workers.values() if w.state != "dying" and w.node not in leaving]

    def start_failed(self, name: str, now: float) -> None:
        """Hold back further starts on a node after a failed one; starts that fail together count once."""
        node = self.nodes.get(name)
        if node is not None and now >= node.start_after:
            node.start_after = now + START_BACKOFF_S[min(node.failed_starts, len(START_BACKOFF_S) - 1)]
            node.failed_starts += 1

    def silent_nodes(self, now: float, timeout_s: float) -> list[str]:
        return [node.name for node in self.nodes.values() if now - node.last_seen > timeout_s]

    def usable(self) -> list[RosterWorker]:
        """Workers that may take part in the next generation."""
        return [
            worker
            for worker in self.workers.values()
            if worker.state == "idle"
            and (node := self.nodes.get(worker.node)) is not None
            and not node.draining
        ]

    def by_device(self, workers: list[RosterWorker]) -> list[list[RosterWorker]]:
        """All of the workers, then without those of the smallest devices, and so on; [] of none."""
        least = sorted(self._device_sizes(workers)) or [0] * bool(workers)
        return [[w for w in workers if self._device_bytes(w) in (0, *least[at:])] for at in range(len(least))]

    def question(self, workers: list[RosterWorker], most: int) -> Question:
        """Put the question for up to ``most`` of these workers, as `choose_members` picks them."""
        taken = choose_members(workers, most)
        sizes = Counter(member.node for member in taken)
        return len(taken), tuple(sizes.values()), min(self._device_sizes(workers), default=0)

    def _device_sizes(self, workers: list[RosterWorker]) -> set[int]:
        return {self._device_bytes(worker) for worker in workers} - {0}

    def _device_bytes(self, worker: RosterWorker) -> int:
        node = self.nodes.get(worker.node)
        return 0 if node is None else node.device_bytes


def starts(roster: Roster, wanted: int, now: float) -> list[str]:
    """Nodes on which to start a worker now (one entry each) so that ``wanted`` live: biggest node first."""
    missing = wanted - len(roster.alive())
    found: list[str] = []
    for node in sorted(roster.nodes.values(), key=lambda node: (-node.capacity, node.name)):
        if node.draining or now < node.start_after:
            continue
        free = node.capacity - sum(worker.node == node.name for worker in roster.workers.values())
        found += [node.name] * max(0, min(free, missing - len(found)))
    return found


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
