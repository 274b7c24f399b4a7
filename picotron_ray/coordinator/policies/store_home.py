"""Search for the rendezvous store of a generation: whose is asked for, how long, and what ends the search.

Another node's is used where a node's stores keep failing, or where its agent is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Interrupt

MOST_FAILURES = 1  # of a node's stores that are put up with
ASKED_SHARE = 0.5  # of elastic.node_timeout_s: so another node is asked before a silent one counts as lost
LEAST_ASKED_S = 1.0  # a store that starts is asked for again and again, and each time takes a thread
SILENT_BEATS = 2.0  # x elastic.heartbeat_s: an agent that said nothing for so long is silent


def asked_s(node_timeout_s: float) -> float:
    """Longest wait for the answer of a node that is asked for its store."""
    return max(LEAST_ASKED_S, ASKED_SHARE * node_timeout_s)


class StoreHomes:
    """Failures of the nodes' rendezvous stores, as one coordinator has heard of them."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # by node: stores that froze, did not start, or do not answer

    def home(self, spec: GenerationSpec, silent: Callable[[str], bool] = lambda node: False) -> str:
        """Return the node whose store a generation is to use.

        It is the node of rank 0, unless its agent is ``silent`` and another member's is not, or its stores
        failed twice and another's less often.
        """
        nodes = dict.fromkeys(member.node for member in spec.members)
        return min(nodes, key=lambda node: (silent(node), max(0, self.failures[node] - MOST_FAILURES)))

    def failed(self, node: str) -> None:
        """Note that a node gave no address of a store."""
        self.failures[node] += 1

    def answered(self, node: str, replaced: int) -> None:
        """Note how many stores of a node were replaced so far, as its agent says."""
        self.failures[node] = max(self.failures[node], replaced)

    def forget(self, node: str) -> None:
        """Forget a node that went: its successor is another."""
        self.failures.pop(node, None)


class StoreSearch:
    """Search for the store of the newest generation; it is over once the members are called.

    Until then they know nothing of the generation. An order to leave it says nothing to them, and who does
    not answer one is killed: so whoever gives the order calls them without a store, which they answer.
    """

    def __init__(self) -> None:
        self._spec: GenerationSpec | None = None

    def begin(self, spec: GenerationSpec) -> None:
        """Begin; the search for an older generation's store is over."""
        self._spec = spec

    def goes_on(self, generation: GenerationId) -> bool:
        """Whether a generation's store is still looked for."""
        return self._spec is not None and self._spec.id == generation

    def end(self, generation: GenerationId) -> bool:
        """End the search for a generation's store; False where it was over before: call nobody."""
        goes_on = self.goes_on(generation)
        if goes_on:
            self._spec = None
        return goes_on

    def given_up(self, order: Interrupt) -> GenerationSpec | None:
        """Return the generation whose members are to be called without a store before an order is given."""
        spec = self._spec
        if order.mode != "hard" or spec is None or not self.end(order.generation):
            return None
        return spec
