"""Health of a run's machines as one: shares, numbers of sick GPUs, and errors as they come.

Nodes come, go and miss a round. A sum of what each has counted so far would fall and rise by that alone, so
that only the growth of each node's own counts is summed up.
"""

from __future__ import annotations

from collections.abc import Mapping


class HealthSums:
    """Health of all machines; for one thread.

    >>> sums = HealthSums()
    >>> sums.joined({"a": {"ecc_errors_total": 3.0}, "b": {"ecc_errors_total": 1.0}})
    {'ecc_errors_total': 0.0}
    >>> sums.joined({"b": {"ecc_errors_total": 2.0, "disk_used_ratio": 0.5}})
    {'disk_used_ratio': 0.5, 'ecc_errors_total': 1.0}
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}  # by node and figure
        self._grown: dict[str, float] = {}

    def joined(self, by_node: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the health of a round; of shares it is the largest, other figures are summed.

        Counts (``_total``) are those since each node was first heard of, of all nodes so far. One that is
        less than before comes of an agent that began anew, from 0.

        Args:
            by_node: what each node that was heard of in this round told of itself.
        """
        found: dict[str, float] = {}
        for node, one in by_node.items():
            for name, value in one.items():
                if name.endswith("_total"):
                    self._count(node, name, value)
                elif name.endswith("_ratio"):
                    found[name] = max(found.get(name, 0.0), value)
                else:
                    found[name] = found.get(name, 0.0) + value
        return {**found, **self._grown}

    def _count(self, node: str, name: str, value: float) -> None:
        before = self._last.get((node, name), value)
        self._last[node, name] = value
        grown = value - before if value >= before else value
        self._grown[name] = self._grown.get(name, 0.0) + grown
