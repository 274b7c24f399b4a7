"""Index of workers by state and by node, kept as they change.

The machine asks after every event who is idle and how many live where. With 16,000 workers a pass over all of
them for each of 16,000 answers takes minutes, so the answers are kept instead of looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["starting", "idle", "busy", "dying"]


@dataclass(eq=False)
class RosterWorker:
    """A worker process as far as is known; ``state`` may be set at any time."""

    name: str
    node: str
    state: State
    since: float
    kills: int = 0  # how often it was ordered to die
    writing: bool = False  # dying, but may seal a snapshot until it is dead

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and (index := self.__dict__.get("index")) is not None:
            index.turned(self, self.state, value)
        object.__setattr__(self, name, value)


class Workers(dict[str, RosterWorker]):
    """Workers by name, in the order in which they were entered; ``version`` grows with every change."""

    def __init__(self) -> None:
        super().__init__()
        self.by_state: dict[str, dict[str, RosterWorker]] = {}
        self.by_node: dict[str, dict[str, RosterWorker]] = {}
        self.version = 0
        self.entered = 0  # how often one came in
        self.vacated: set[str] = set()  # nodes that one left, until `Roster.roomy` has looked

    def __setitem__(self, name: str, worker: RosterWorker) -> None:
        self.pop(name, None)
        super().__setitem__(name, worker)
        self.by_state.setdefault(worker.state, {})[name] = worker
        self.by_node.setdefault(worker.node, {})[name] = worker
        worker.__dict__["index"] = self
        self.version += 1
        self.entered += 1

    def __delitem__(self, name: str) -> None:
        worker = self[name]
        super().__delitem__(name)
        del self.by_state[worker.state][name]
        here = self.by_node[worker.node]
        del here[name]
        if not here:
            del self.by_node[worker.node]
        self.vacated.add(worker.node)
        del worker.__dict__["index"]
        self.version += 1

    def pop(self, name: str, default: Any = None) -> Any:
        """Take a worker out; ``default`` where there is none."""
        worker = self.get(name)
        if worker is None:
            return default
        del self[name]
        return worker

    def turned(self, worker: RosterWorker, old: str, new: str) -> None:
        """Note that a worker's state has changed."""
        if old != new:
            del self.by_state[old][worker.name]
            self.by_state.setdefault(new, {})[worker.name] = worker
            self.version += 1

    def count(self, *states: str) -> int:
        return sum(len(self.by_state.get(state, ())) for state in states)

    def count_on(self, node: str) -> int:
        return len(self.by_node.get(node, ()))

    def on(self, node: str) -> list[RosterWorker]:
        """Workers on a node."""
        return list(self.by_node.get(node, {}).values())
