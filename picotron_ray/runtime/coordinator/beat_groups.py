"""Groups of nodes whose heartbeats travel together.

One call of an actor costs the coordinator's process about 0.3 ms, so some thousand nodes that each call once
a second take more than half of a core for the calls alone. From ``FEWEST`` nodes on, a node that calls by
itself is told in the answer which other node's agent takes its heartbeats from then on; one call then brings
those of up to ``MOST`` nodes. An agent whose relay does not confirm goes back to calling by itself
(``runtime.node_agent.beats``) and is given another one, so a relay that dies, freezes or is cut off costs
its group one heartbeat, of the several that ``elastic.node_timeout_s`` spans.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

FEWEST = 64  # nodes that may all call by themselves
MOST = 64  # nodes in one call
RECENT_BEATS = 3.0  # a relay that did not call for so long gets no further nodes


@dataclass(slots=True)
class Relay:
    """A node that brings the heartbeats of others; ``heard``: its own last call."""

    heard: float
    members: set[str] = field(default_factory=set)


class BeatGroups:
    """Relays and their members; may be called from several threads.

    Times are passed in, in seconds of one monotonic clock.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._lock = threading.Lock()
        self._recent_s = RECENT_BEATS * heartbeat_s
        self._relays: dict[str, Relay] = {}
        self._relay_of: dict[str, str] = {}
        self._alone: set[str] = set()  # nodes that call by themselves

    def called(self, node: str, brought: int, now: float) -> str:
        """Note a call of ``node``; returns the node that is to carry its heartbeats, empty: itself.

        Args:
            brought: number of other nodes whose heartbeats came with it.
        """
        with self._lock:
            relay = self._relays.get(node)
            if relay is not None:
                relay.heard = now
                if brought or relay.members:
                    return ""
                del self._relays[node]
            return self._called_alone(node, now)

    def _called_alone(self, node: str, now: float) -> str:
        left = self._leave(node)
        self._alone.add(node)
        if len(self._alone) + len(self._relay_of) + len(self._relays) <= FEWEST:
            return ""
        return self._assign(node, left, now)

    def _leave(self, node: str) -> str:
        """Take a node that calls by itself out of its group; returns the relay that let it down."""
        left = self._relay_of.pop(node, "")
        if left in self._relays:
            self._relays[left].members.discard(node)
        return left

    def _assign(self, node: str, avoided: str, now: float) -> str:
        for name, relay in list(self._relays.items()):
            if now - relay.heard > self._recent_s:
                self._drop(name)
            elif name != avoided and len(relay.members) < MOST - 1:
                relay.members.add(node)
                self._relay_of[node] = name
                self._alone.discard(node)
                return name
        self._relays[node] = Relay(now)
        self._alone.discard(node)
        return ""

    def _drop(self, name: str) -> None:
        for member in self._relays.pop(name).members:
            self._relay_of.pop(member, None)

    def forget(self, node: str) -> None:
        """Note that a node is gone; its group finds new relays by itself."""
        with self._lock:
            if node in self._relays:
                self._drop(node)
            self._leave(node)
            self._alone.discard(node)
